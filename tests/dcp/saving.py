"""What the tests of `relight.dcp` share: saving, loading, and the error behind what DCP raises."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from relight.dcp import Reader, Writer
from relight.manifest.catalog import Catalog
from relight.storage.backend import open_backend


def save(state: dict[str, Any], url: str | Path, *, planner: Any = None, **options: Any) -> Any:
    """Save by `dcp.save` to a place."""
    return save_by(Writer(url, **options), state, planner=planner)


def save_by(writer: Writer, state: dict[str, Any], **options: Any) -> Any:
    """Save by `dcp.save` and a writer; DCP's warning that one process saves alone says nothing here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return dcp.save(state, storage_writer=writer, **options)


def load(state: dict[str, Any], url: str | Path, *, planner: Any = None, **options: Any) -> dict[str, Any]:
    """Load by `dcp.load`, and return the state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=Reader(url, **options), planner=planner)
    return state


def error_of(act: Any, *args: Any, rank: int = 0, **options: Any) -> BaseException:
    """Return what `act` raised on `rank`, taken out of DCP's wrapping."""
    with pytest.raises(CheckpointException) as caught:
        act(*args, **options)
    return caught.value.failures[rank][0]


def catalog_of(url: str | Path) -> Catalog:
    """Return the catalog of the run at `url`."""
    return Catalog(open_backend(str(url)))


def steps_of(url: str | Path) -> list[tuple[int, int]]:
    """Return (step, generation) of the committed checkpoints, newest first."""
    return [(info.step, info.generation) for info in catalog_of(url).committed()]
