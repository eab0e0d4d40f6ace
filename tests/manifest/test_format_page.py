"""docs/format.md: every clause names tests that exist, and the example is what relight does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from relight.manifest.index import StoredIndex
from relight.manifest.manifest import decode_index
from relight.manifest.shard import Layout, Spread

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


def test_the_example_of_the_index_is_right() -> None:
    example = PAGE.read_text().partition("### An example\n")[2]
    written = json.loads(re.search(r"```json\n(.*?)```", example, re.DOTALL)[1])
    index = StoredIndex(
        decode_index(msgspec.Raw(json.dumps(written["index"]).encode())),
        msgspec.convert(written["layouts"], list[Layout]),
    )
    sizes = {key: (4, entry.shape) for key, entry in index.entries.items()}
    spread = Spread(index.layouts[0], [(key, *size) for key, size in sizes.items()])
    rows = re.findall(r"^\| (\d+) \| (\d+), (\d+) \| (.*) \|$", example, re.MULTILINE)
    assert len(rows) == 4
    for rank, *coordinates, names in rows:
        assert index.layouts[0].coordinates(int(rank)) == tuple(map(int, coordinates))
        stored = [piece.name for piece in spread.stored_by(int(rank)).values()]
        assert stored == re.findall(r"`([^`]+)`", names)
    assert {piece.name for key in index.entries for piece in index.pieces(key)} == {
        name for *_, names in rows for name in re.findall(r"`([^`]+)`", names)
    } - {"c"}
