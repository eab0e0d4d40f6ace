"""The command as users and scripts meet it: output, JSON, exit codes, errors of one line, no torch, no waiting."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relight.cli import main
from relight.cli.exits import report
from relight.cli.layouts import layout_words, ownership
from relight.cli.runs import plain
from relight.cli.verbs import VERBS, load_verb
from relight.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    KeeperUnavailableError,
    MissingCopyError,
    RelightError,
    StorageFullError,
)
from relight.manifest.catalog import Catalog
from relight.manifest.index import StoredIndex
from relight.manifest.manifest import EQUAL, IN_PIECES, PER_RANK, IndexEntry, Parent
from relight.manifest.names import image_name, manifest_name
from relight.manifest.shard import Box, Layout, Piece, Spread
from relight.storage.local import LocalBackend
from relight.testing.checkpoints import write_checkpoint
from relight.testing.files import UnsyncedFiles

TWO_RANKS = [
    {"model/a": ("U8", (64,), bytes(range(64))), "model/b": ("F32", (32,), b"\1" * 128)},
    {"optimizer/c": ("U8", (64,), b"c" * 64)},
]
CONTEXT = {
    "settings": {"total_steps": 100, "betas": {"$tuple": [0.9, 0.95]}, "blob": {"$bytes": "AAAA"}},
    "data": {"kind": "elastic", "epoch": 1, "samples": 320},
    "rng": {"python": [1], "torch": {"$bytes": "AAAA"}},
}


@pytest.fixture(autouse=True)
def own_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_ARENA_DIR", str(tmp_path / "arena"))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Return a run: steps 10 and 20 of generation 1 (20 left behind), 15 of generation 2, an unfinished 25."""
    made = Catalog(LocalBackend(tmp_path / "run", UnsyncedFiles()))
    made.claim(None)
    write_checkpoint(made, 10, tensors=TWO_RANKS, context=CONTEXT, metrics={"loss": 0.5}, is_verified=True)
    write_checkpoint(made, 20, tensors=TWO_RANKS, context=CONTEXT, metrics={"loss": float("nan")})
    parent = Parent(step=10, generation=1)
    made.claim(parent)
    write_checkpoint(made, 15, 2, tensors=TWO_RANKS, parent=parent, context=CONTEXT, is_verified=True)
    made.put_image(25, 2, 0, b"unfinished")
    return made


@pytest.fixture
def run(catalog: Catalog, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs one command line and gives exit code, stdout and stderr; RUN is the run's path."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main([word.replace("RUN", str(catalog.backend.root)) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ls and show


def test_ls_json_lists_checkpoints_newest_first_with_the_fields_that_scripts_rely_on(
    run, catalog: Catalog
) -> None:
    code, out, err = run("ls", "RUN", "--json")
    listed = json.loads(out)
    assert (code, err) == (0, "")
    assert [(c["step"], c["generation"], c["on_lineage"], c["verified"]) for c in listed] == [
        (20, 1, False, False),
        (15, 2, True, True),
        (10, 1, True, True),
    ]
    assert listed[2] == {
        "step": 10,
        "generation": 1,
        "bytes": sum(path.stat().st_size for path in catalog.backend.root.glob("step-*10.g*/*.safetensors")),
        "committed": "2023-11-14T22:13:31.000+00:00",
        "tiers": [catalog.backend.url],
        "verified": True,
        "pinned": False,
        "on_lineage": True,
        "world_size": 2,
        "metrics": {"loss": 0.5},
        "replicas_differ": [],
    }
    assert listed[0]["metrics"] == {"loss": None}


def test_ls_prints_a_table_that_reads_well_in_a_pipe(run) -> None:
    code, out, _ = run("ls", "RUN")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == [
        "step",
        "generation",
        "size",
        "committed",
        "tiers",
        "ranks",
        "state",
        "metrics",
    ]
    assert lines[1].split()[:2] == ["20", "1"]
    assert "left behind" in lines[1]
    assert "loss=not finite" in lines[1]
    assert "verified" in lines[3]
    assert lines[4] == "unfinished: step 25 of generation 2"
    assert all(line == line.rstrip() for line in lines)


def test_ls_of_a_file_url_is_the_same(run, catalog: Catalog) -> None:
    assert run("ls", f"file://{catalog.backend.root}", "--json") == run("ls", "RUN", "--json")


def test_ls_of_a_run_without_commits_is_an_empty_list(run, tmp_path: Path) -> None:
    Catalog(LocalBackend(tmp_path / "new")).claim(None)
    assert run("ls", str(tmp_path / "new"), "--json") == (0, "[]\n", "")
    assert run("ls", str(tmp_path / "new")) == (0, "no checkpoint is committed\n", "")


def test_a_broken_manifest_is_a_warning_in_ls_and_a_problem_in_verify(run, catalog: Catalog) -> None:
    flip(catalog.backend.root / manifest_name(10, 1), 40)
    code, out, err = run("ls", "RUN", "--json")
    assert (code, [c["step"] for c in json.loads(out)]) == (0, [20, 15])
    assert err.startswith("relight: warning: step-000000000010.g0001/manifest.json: ")
    code, out, _ = run("verify", "RUN", "--step", "10", "--json")
    assert (code, json.loads(out)["problems"][0]["file"]) == (1, manifest_name(10, 1))


def test_show_tells_what_a_checkpoint_holds(run) -> None:
    code, out, _ = run("show", "RUN", "--json")
    shown = json.loads(out)
    assert code == 0
    assert (shown["step"], shown["generation"], shown["parent"]["step"]) == (15, 2, 10)
    assert shown["settings"] == {"total_steps": 100, "betas": [0.9, 0.95], "blob": "<bytes, 3 bytes>"}
    assert shown["data"] == {"kind": "elastic", "epoch": 1, "samples": 320}
    assert shown["rng"] == ["python", "torch"]
    assert {part["part"]: (part["tensors"], part["bytes"]) for part in shown["parts"]} == {
        "data": (0, 0),
        "model": (2, 192),
        "optimizer": (1, 64),
        "rng": (0, 0),
        "settings": (0, 0),
    }
    assert [made["generation"] for made in shown["generations"]] == [1, 2]


def test_show_prints_the_same_for_people(run) -> None:
    code, out, _ = run("show", "RUN", "--step", "10", "--tensors")
    assert code == 0
    for line in (
        "step:         10 of generation 1, 2 ranks",
        "started from: nothing",
        "metrics:      loss=0.5",
        "settings:     total_steps=100, betas=[0.9, 0.95], blob=<bytes, 3 bytes>",
        "data:         kind=elastic, epoch=1, samples=320",
        "rng:          python, torch",
    ):
        assert line in out.splitlines()
    assert "model/b      float32  32     whole on rank 0  128 B" in out


def test_show_of_one_step_of_several_generations(run) -> None:
    assert (
        json.loads(run("show", "RUN", "--step", "20", "--generation", "1", "--json")[1])["on_lineage"]
        is False
    )
    code, _, err = run("show", "RUN", "--step", "20", "--generation", "2")
    assert code == 2
    assert "step 20 is not committed; the newest committed steps are: 10, 15, 20" in err


# verify


def test_verify_exits_with_0_when_every_byte_is_good(run, catalog: Catalog) -> None:
    before = sorted(path.name for path in catalog.backend.root.rglob("*"))
    code, out, err = run("verify", "RUN", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "good": True,
        "checkpoints": [
            {"step": 10, "generation": 1, "good": True},
            {"step": 15, "generation": 2, "good": True},
            {"step": 20, "generation": 1, "good": True},
        ],
        "problems": [],
    }
    assert run("verify", "RUN", "--step", "15")[1] == "step 15 of generation 2: good\n"
    assert sorted(path.name for path in catalog.backend.root.rglob("*")) == before


def test_verify_exits_with_1_and_names_file_and_block(run, catalog: Catalog) -> None:
    name = image_name(15, 2, 1)
    flip(catalog.backend.root / name, -1)
    code, out, _ = run("verify", "RUN", "--json")
    found = json.loads(out)
    assert (code, found["good"]) == (1, False)
    assert [(p["file"], p["block"]) for p in found["problems"]] == [(name, 0)]
    assert [c["good"] for c in found["checkpoints"]] == [True, False, True]
    code, out, _ = run("verify", "RUN", "--step", "15")
    assert code == 1
    assert "step 15 of generation 2: BAD" in out
    assert f"{name}: block 0 (rank 1" in out
    assert "holds optimizer/c" in out
    assert run("verify", "RUN", "--step", "10")[0] == 0


def test_verify_checks_the_generation_files_too(run, catalog: Catalog) -> None:
    flip(catalog.backend.root / "generations/g0001.json", 5)
    code, out, _ = run("verify", "RUN", "--json")
    assert (code, json.loads(out)["problems"][0]["file"]) == (1, "generations/g0001.json")
    assert run("verify", "RUN", "--step", "10")[0] == 0


def test_verify_can_mark_what_it_found_good(run, catalog: Catalog) -> None:
    assert not catalog.is_verified(20, 1)
    assert run("verify", "RUN", "--mark")[0] == 0
    assert catalog.is_verified(20, 1)


def test_verify_of_a_step_that_is_not_there_is_wrong_usage(run) -> None:
    code, out, err = run("verify", "RUN", "--step", "11", "--json")
    assert (code, out) == (2, "")
    assert "step 11 is not committed" in err


# diff


def test_equal_checkpoints_exit_with_0(run) -> None:
    assert run("diff", "RUN", "10", "10") == (0, "equal\n", "")
    assert run("diff", "RUN", "10", "20") == (0, "equal\n", "")
    assert run("diff", "RUN", "RUN") == (0, "equal\n", "")


def test_differences_are_named_and_exit_with_1(run, catalog: Catalog) -> None:
    changed = [
        {"model/a": ("U8", (64,), bytes(64)), "model/b": ("I32", (32,), b"\1" * 128)},
        {"new/d": ("U8", (64,), b"c" * 64)},
    ]
    context = CONTEXT | {"data": {"kind": "elastic", "epoch": 2, "samples": 320}, "more": 1}
    write_checkpoint(catalog, 30, 2, tensors=changed, context=context)
    code, out, _ = run("diff", "RUN", "15", "30", "--json")
    found = json.loads(out)
    assert (code, found["equal"], found["left"]["step"], found["right"]["step"]) == (1, False, 15, 30)
    assert [(d["kind"], d["key"], d["message"]) for d in found["differences"]] == [
        ("changed", "model/a", "uint8 [64]: other content"),
        ("changed", "model/b", "float32 [32] -> int32 [32]"),
        ("added", "new/d", "uint8 [64]"),
        ("removed", "optimizer/c", "uint8 [64]"),
        ("changed", "context of rank 0/data/epoch", "1 -> 2"),
        ("added", "context of rank 0/more", "1"),
        ("changed", "context of rank 1/data/epoch", "1 -> 2"),
        ("added", "context of rank 1/more", "1"),
    ]
    code, out, _ = run("diff", "RUN", "15", "30")
    assert (code, out.splitlines()[-1]) == (1, "8 differences")


def test_a_layout_is_no_difference_in_content(run, catalog: Catalog, tmp_path: Path) -> None:
    other = Catalog(LocalBackend(tmp_path / "one-rank"))
    write_checkpoint(other, 7, tensors=[TWO_RANKS[0] | TWO_RANKS[1]], context=CONTEXT)
    code, out, _ = run("diff", "RUN", "15", f"{tmp_path / 'one-rank'}@7")
    assert out == "changed  world size: 2 -> 1\n1 difference\n"
    assert code == 1


SHAPE = (4, 16, 2)
ITEMS = [struct.pack("<i", number) for number in range(128)]


def cut(box: Box) -> tuple[str, tuple[int, ...], bytes]:
    """Return the box of a tensor of `SHAPE` that counts up from 0."""
    places = itertools.product(*(range(o, o + s) for o, s in zip(*box, strict=True)))
    return "I32", box.sizes, b"".join(ITEMS[(x * 16 + y) * 2 + z] for x, y, z in places)


def write_whole(root: Path, num_ranks: int) -> None:
    tensors = [{"w": cut(Box((0, 0, 0), SHAPE))}, *([{}] * (num_ranks - 1))]
    write_checkpoint(Catalog(LocalBackend(root, UnsyncedFiles())), 1, tensors=tensors)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0, 0), (2, 16, 2)), ((2, 0, 0), (2, 16, 2))],
        [((0, 0, 0), (4, 4, 2)), ((0, 4, 0), (4, 12, 2))],
        [((0, 0, 0), (4, 16, 1)), ((0, 0, 1), (4, 16, 1))],
        [((0, 0, 0), (4, 16, 2)), ((4, 0, 0), (0, 16, 2))],
        [((0, 0, 0), (3, 16, 2)), ((3, 0, 0), (1, 8, 2)), ((3, 8, 0), (1, 8, 2))],
    ],
)
def test_tensors_in_pieces_are_compared_as_wholes(tmp_path: Path, capsys, boxes) -> None:
    """A tensor of shape 4 x 16 x 2, items of 4 bytes, whole in one run and cut up in the other."""
    write_whole(tmp_path / "left", len(boxes))
    pieces = tuple(Piece(rank, "w", *box) for rank, box in enumerate(boxes))
    write_checkpoint(
        Catalog(LocalBackend(tmp_path / "right")),
        1,
        tensors=[{"w": cut(Box(*box))} for box in boxes],
        index={"w": IndexEntry("int32", SHAPE, IN_PIECES, pieces)},
    )
    assert main(["diff", str(tmp_path / "left"), str(tmp_path / "right")]) == 0
    flip(tmp_path / "right" / image_name(1, 1, len(boxes) - 2), -5)
    assert main(["diff", str(tmp_path / "left"), str(tmp_path / "right")]) == 1
    assert "w: int32 [4, 16, 2]: other content" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout.on((4,), range(4), ((0, 0),)), "sharded dim 0 over 4"),
        (Layout.on((2, 2), range(4), ((1, 0),)), "sharded dim 0 over 2, replicated on 2"),
        (Layout.on((2, 2), range(4), ((0, 0), (1, 1))), "sharded dim 0 over 2, dim 1 over 2"),
        (Layout.on((2, 2), (3, 1, 0, 2), ((1, 1), (0, 1))), "sharded dim 1 over 2 x 2"),
        (Layout.on((4,), range(4)), "replicated on 4"),
    ],
)
def test_tensors_that_a_rule_spreads_are_compared_as_wholes_and_shown_in_words(
    tmp_path: Path, capsys, layout: Layout, words: str
) -> None:
    write_whole(tmp_path / "left", 4)
    spread = Spread(layout, [("w", 4, SHAPE)])
    write_checkpoint(
        Catalog(LocalBackend(tmp_path / "right", UnsyncedFiles())),
        1,
        tensors=[
            {piece.name: cut(piece.box) for piece in spread.stored_by(rank).values()} for rank in range(4)
        ],
        index={"w": IndexEntry("int32", SHAPE, 0)},
        layouts=[layout],
    )
    assert main(["diff", str(tmp_path / "left"), str(tmp_path / "right")]) == 0
    flip(tmp_path / "right" / image_name(1, 1, 2), -5)
    assert main(["diff", str(tmp_path / "left"), str(tmp_path / "right")]) == 1
    assert "w: int32 [4, 16, 2]: other content" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "right"), "--tensors", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors"] == [
        {
            "name": "w",
            "dtype": "int32",
            "shape": [4, 16, 2],
            "ownership": "sharded" if layout.splits else "replicated",
            "layout": words,
            "bytes": 512,
        }
    ]
    assert {part["part"]: (part["tensors"], part["bytes"]) for part in shown["parts"]} == {"w": (1, 512)}


def test_a_layout_in_words() -> None:
    entries = {
        "a": IndexEntry("int8", (4,), PER_RANK),
        "b": IndexEntry(
            "int8", (4,), IN_PIECES, (Piece(0, "b@0:2", (0,), (2,)), Piece(1, "b@2:4", (2,), (2,)))
        ),
        "c": IndexEntry("int8", (4,), 0),
        "d": IndexEntry("int8", (4,), 1),
        "e": IndexEntry("int8", (4,), EQUAL),
    }
    index = StoredIndex(entries, [Layout(base=3), Layout.on((1, 1), [5], ((0, 0),))])
    assert [layout_words(index, key) for key in entries] == [
        "per rank",
        "in 2 pieces",
        "whole on rank 3",
        "whole on rank 5",
        "per rank, all equal",
    ]
    assert [ownership(index, key) for key in entries] == ["per-rank", "sharded", *["replicated"] * 3]


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0, 0), (2, 16, 2)), ((3, 0, 0), (1, 16, 2))],
        [((0, 0, 0), (2, 16, 2)), ((1, 0, 0), (2, 16, 2))],
        [((0, 0, 0), (2, 16, 2)), ((3, 0, 0), (2, 16, 2))],
    ],
)
def test_pieces_that_leave_a_hole_are_an_error_and_no_content(tmp_path: Path, capsys, boxes) -> None:
    write_whole(tmp_path / "left", 2)
    pieces = tuple(Piece(rank, "w", *box) for rank, box in enumerate(boxes))
    write_checkpoint(
        Catalog(LocalBackend(tmp_path / "right", UnsyncedFiles())),
        1,
        tensors=[{"w": cut(Box((0, 0, 0), sizes))} for _, sizes in boxes],
        index={"w": IndexEntry("int32", SHAPE, IN_PIECES, pieces)},
    )
    assert main(["diff", str(tmp_path / "left"), str(tmp_path / "right")]) != 0
    assert "w: the pieces in the index do not cover the tensor once" in capsys.readouterr().err


def write_per_rank(root: Path, values: list[bytes], layout: int = PER_RANK) -> None:
    """Store a checkpoint of step 1 in which every rank has a value of its own under the key ``rng/state``."""
    write_checkpoint(
        Catalog(LocalBackend(root, UnsyncedFiles())),
        1,
        tensors=[{"rng/state": ("U8", (64,), value)} for value in values],
        index={"rng/state": IndexEntry("uint8", (64,), layout)},
        local=[{"rng/state": ("uint8", (64,))} for _ in values],
    )


def test_values_of_the_ranks_that_are_equal_are_compared_once(tmp_path: Path, capsys) -> None:
    for name, values in (("two", [b"a" * 64] * 2), ("three", [b"a" * 64] * 3), ("other", [b"b" * 64] * 2)):
        write_per_rank(tmp_path / name, values, EQUAL)
    assert main(["diff", str(tmp_path / "two"), str(tmp_path / "three")]) == 1
    assert capsys.readouterr().out == "changed  world size: 2 -> 3\n1 difference\n"
    assert main(["diff", str(tmp_path / "two"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out == "changed  rng/state: uint8 [64]: other content\n1 difference\n"


def test_values_of_each_rank_are_compared_and_shown_by_rank(tmp_path: Path, capsys) -> None:
    write_per_rank(tmp_path / "left", [b"a" * 64, b"b" * 64])
    write_per_rank(tmp_path / "right", [b"a" * 64, b"c" * 64])
    assert main(["diff", str(tmp_path / "left"), str(tmp_path / "left")]) == 0
    assert main(["diff", str(tmp_path / "left"), str(tmp_path / "right")]) == 1
    assert "changed  rng/state [rank 1]: uint8 [64]: other content" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "left"), "--tensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == [
        {
            "name": "rng/state",
            "dtype": "uint8",
            "shape": [64],
            "ownership": "per-rank",
            "layout": "per rank",
            "bytes": 128,
        }
    ]


# prune, pin, unpin


def test_prune_shows_what_goes_and_why_and_a_dry_run_removes_nothing(run, catalog: Catalog) -> None:
    code, out, _ = run("prune", "RUN", "--keep", "1", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out) == {
        "removed": [
            {"step": 10, "generation": 1, "reason": "1 newer verified, keep is 1"},
            {"step": 20, "generation": 1, "reason": "generation 2 does not build on it"},
        ],
        "dry_run": True,
    }
    code, out, _ = run("prune", "RUN", "--keep", "1", "--dry-run")
    assert out.splitlines()[-1].startswith("would remove 2 checkpoints, ")
    assert len(catalog.committed()) == 3
    code, out, _ = run("prune", "RUN", "--keep", "1")
    assert out.splitlines()[-1].startswith("removed 2 checkpoints, ")
    assert [info.step for info in catalog.committed()] == [15]
    assert catalog.incomplete() == [(25, 2)]


def test_prune_keeps_what_the_rule_names(run, catalog: Catalog) -> None:
    assert run("prune", "RUN", "--keep", "1", "--keep-every", "5")[0] == 0
    assert [info.step for info in catalog.committed()] == [15, 10]
    assert run("prune", "RUN", "--keep", "1", "--keep-best", "loss:min")[0] == 0
    assert [info.step for info in catalog.committed()] == [15, 10]


@pytest.mark.parametrize(
    "option", [("--keep", "0"), ("--keep-every", "0"), ("--keep-best", "loss"), ("--keep", "x")]
)
def test_prune_refuses_rules_that_make_no_sense(run, catalog: Catalog, option: tuple[str, str]) -> None:
    code, _, err = run("prune", "RUN", *option)
    assert code == 2
    assert err.startswith("relight")
    assert len(catalog.committed()) == 3


def test_prune_says_when_too_little_is_verified(run, catalog: Catalog) -> None:
    _, _, err = run("prune", "RUN", "--keep", "3")
    assert err == ""
    write_checkpoint(catalog, 40, 2)
    assert "relight verify" in run("prune", "RUN", "--keep", "3")[2]


def test_a_pinned_checkpoint_survives_until_it_is_unpinned(run, catalog: Catalog) -> None:
    assert run("pin", "RUN", "10") == (0, "pinned step 10 of generation 1\n", "")
    run("prune", "RUN", "--keep", "1")
    assert [info.step for info in catalog.committed()] == [15, 10]
    assert run("unpin", "RUN", "10")[0] == 0
    run("prune", "RUN", "--keep", "1")
    assert [info.step for info in catalog.committed()] == [15]
    assert run("pin", "RUN", "10")[0] == 2


# errors


def test_the_verbs_are_described_as_they_describe_themselves() -> None:
    for verb, (_, summary) in VERBS.items():
        said = (load_verb(verb).__doc__ or "").splitlines()[0]
        assert said.startswith(summary.rstrip(".")), verb


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("lss", "RUN"), "did you mean `relight ls`?"),
        (("keeper",), "did you mean `relight keeper"),
        (("keeper", "stop-it"), "did you mean `relight keeper stop`?"),
        (("frobnicate",), "`relight --help` lists all"),
        (("--frobnicate",), "`relight --help` lists all"),
        (("ls",), "try: relight ls --help"),
        (("ls", "RUN", "--frobnicate"), "try: relight ls --help"),
        (("show", "RUN", "--step", "ten"), "try: relight show --help"),
        (("ls", "s3://bucket/run"), "use a path or file:///path"),
        (("ls", "RUN/none"), "holds no checkpoints of relight; give the root of a run"),
        (("ls", "RUN/step-000000000010.g0001"), "is one checkpoint; give the root of its run"),
        (("pin", "RUN", "11"), "the newest committed steps are: 10, 15, 20"),
        (("diff", "RUN", "15", "RUN@11"), "step 11 is not committed"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(run, words: tuple[str, ...], advice: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert advice in err
    assert "Traceback" not in err
    assert all(line.startswith(("relight", "try: ")) for line in err.splitlines())


def test_unavailable_storage_exits_with_3(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("relight.storage.local.os.scandir", fail)
    code, out, err = run("ls", "RUN")
    assert (code, out) == (3, "")
    assert "Permission denied" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (MissingCopyError("x"), 2),
        (CorruptionError("x"), 1),
        (StorageFullError("x"), 3),
        (KeeperUnavailableError("x"), 3),
        (FencedError("x"), 4),
        (RelightError("two\nlines"), 1),
    ],
)
def test_errors_become_one_line_and_the_documented_code(error: RelightError, code: int, capsys) -> None:
    assert report(error) == code
    assert capsys.readouterr().err in ("relight: x\n", "relight: two lines\n")


def test_an_interrupt_exits_with_130(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("relight.cli.listing.open_run", interrupt)
    assert run("ls", "RUN") == (130, "", "")


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ({"$tuple": [1, {"$tuple": []}]}, [1, []]),
        ({"$int": "0x10"}, 16),
        ({"$bytearray": "AAAA"}, "<bytearray, 3 bytes>"),
        ({"$dict": [[1, "x"], ["k", {"$set": [2]}]]}, {"1": "x", "k": [2]}),
        ({"$dtype": "float32"}, '<dtype "float32">'),
        ("x" * 100, "x" * 60 + "..."),
        ({"a": [None, True, 1.5]}, {"a": [None, True, 1.5]}),
    ],
)
def test_typed_values_are_shown_as_plain_ones(typed, shown) -> None:
    assert plain(typed) == shown


def test_on_a_terminal_there_are_tables_and_a_progress_bar(catalog: Catalog) -> None:
    code = "import sys; from relight.cli import main; sys.exit(main())"
    for words, shown in (
        (["ls"], b"committed"),
        (["verify"], b"verifying"),
        (["diff", "10", "15"], b"comparing"),
    ):
        verb, *rest = words
        argv = [sys.executable, "-c", code, verb, str(catalog.backend.root), *rest]
        said = on_terminal(argv)
        assert shown in said


def on_terminal(argv: list[str]) -> bytes:
    """Run a process on a terminal of its own and return what it wrote there."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(argv, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "200"})
    os.close(theirs)
    said = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        said += data
    os.close(ours)
    process.wait(timeout=50)
    return said


def test_without_a_keeper_save_and_keeper_verbs_say_so(run) -> None:
    for words in (("save", "RUN"), ("keeper", "stop", "RUN"), ("keeper", "status", "RUN")):
        code, out, err = run(*words)
        assert (code, out) == (3, "")
        assert "no keeper of" in err
    assert run("keeper", "status") == (0, "no keeper is running\n", "")
    assert run("keeper", "status", "--json") == (0, "[]\n", "")
    assert run("keeper", "clean") == (0, "freed 0 B of shared memory\n", "")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_lists_every_verb_and_the_exit_codes(run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert all(f"  {verb} " in out for verb in VERBS)
    assert "Exit codes: 0" in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(run, verb: str) -> None:
    code, out, err = run(*verb.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Usage: relight {verb}" in out


# as a process


def command(*words: str, **options) -> subprocess.CompletedProcess[str]:
    code = "import sys; from relight.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=50, **options)


def test_the_version_is_printed() -> None:
    import relight

    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"relight {relight.__version__}\n")


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        command("--help")
        times.append(time.perf_counter() - started)
    assert min(times) < 0.2


def test_no_verb_loads_torch_or_numpy(catalog: Catalog) -> None:
    root = str(catalog.backend.root)
    lines = ["import sys", "from relight.cli import main"]
    verbs = (["ls", root], ["show", root], ["verify", root], ["diff", root, "10", "15"], ["prune", root])
    lines += [f"main({words!r})" for words in verbs]
    lines.append("print(sorted({'torch', 'numpy', 'aiohttp'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_early_is_no_error(catalog: Catalog) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from relight.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, "ls", str(catalog.backend.root), "--json"]
    done = subprocess.run(argv, stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=50)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")
