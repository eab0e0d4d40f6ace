"""docs/format.md: every clause names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "format.md"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_clause_names_a_test() -> None:
    clauses = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+\.\d+ \|", line)]
    assert len(clauses) > 25
    assert [line for line in clauses if not REFERENCE.search(line)] == []


def test_every_test_that_a_clause_names_exists() -> None:
    named = REFERENCE.findall(PAGE.read_text())
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^def {name}\(", (REPOSITORY / path).read_text(), re.MULTILINE)
    ]
    assert missing == []
