"""What tests of conversions share: a run's root, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relight.cli import main
from relight.manifest.catalog import Catalog
from relight.storage.local import LocalBackend
from relight.testing.files import UnsyncedFiles
from tests.running import home

__all__ = ["home"]


@pytest.fixture(autouse=True)
def own_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_ARENA_DIR", str(tmp_path / "arena"))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Return the catalog of an empty root."""
    return Catalog(LocalBackend(tmp_path / "run", UnsyncedFiles()))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """Return a function that runs a verb with --json and gives exit code, what was printed, and stderr.

    AT/ in a word stands for this test's own folder.
    """

    def call(*words: object) -> tuple[int, Any, str]:
        code = main([str(word).replace("AT/", f"{tmp_path}/") for word in words] + ["--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else None, said.err

    return call
