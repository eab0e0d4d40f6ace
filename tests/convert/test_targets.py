"""A target exists whole or not at all, is never overwritten unasked, and needs little memory to be made."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relight.errors import ConfigError, RelightError, StorageFullError
from relight.manifest.catalog import POINTS as CATALOG_POINTS
from relight.manifest.catalog import Catalog
from relight.manifest.foreign.exporting import choose_keys, export_tensors, names_of
from relight.manifest.foreign.importing import POINTS as IMPORT_POINTS
from relight.manifest.foreign.staging import POINTS as STAGE_POINTS
from relight.manifest.shard import Layout
from relight.manifest.tensors import CheckpointTensors
from relight.storage.backend import open_backend
from relight.storage.local import LocalBackend
from relight.testing.files import FailingFiles, FullDiskFiles, UnsyncedFiles
from tests.convert.stored import noise, store

KINDS = {
    "safetensors": ["AT/out.safetensors"],
    "torch": ["AT/out.pt"],
    "hf": ["AT/out-hf", "--shard-size", "2 kB"],
    "dcp": ["AT/out-dcp", "--format", "dcp"],
}


@pytest.fixture
def small(catalog: Catalog) -> Catalog:
    store(catalog, {f"model/w{at}": noise(at, "float32", (20, 20)) for at in range(3)})
    return catalog


def alone(words: list[str], *, kill_at: str = "", occurrence: int = 1) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, which may be killed at a point."""
    code = f"""
import os, signal, sys
from relight import stages
from relight.cli import main
left = [{occurrence}]
def observe(point):
    if point == {kill_at!r}:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
stages.subscribe(observe)
code = main(sys.argv[1:])
# Not the ru_maxrss of getrusage, which begins with what the process that started this one had.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("torch" in sys.modules, status["VmHWM"].split()[0])
sys.exit(code)
"""
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=55
    )


def at(tmp_path: Path, words: list[str]) -> list[str]:
    return [word.replace("AT/", f"{tmp_path}/") for word in words]


@pytest.mark.parametrize("kind", KINDS)
def test_an_existing_target_stays_unless_forced(small: Catalog, run: Any, tmp_path: Path, kind: str) -> None:
    words = KINDS[kind]
    assert run("export", "AT/run", *words)[0] == 0
    target = tmp_path / words[0].removeprefix("AT/")
    before = {path: path.stat().st_ino for path in [target, *target.glob("*")]}
    code, _, err = run("export", "AT/run", *words)
    assert (code, "is there already; --force replaces it" in err) == (2, True)
    assert {path: path.stat().st_ino for path in [target, *target.glob("*")]} == before
    assert run("export", "AT/run", *words, "--force")[0] == 0
    assert target.stat().st_ino != before[target]
    assert not list(tmp_path.glob(".tmp-*"))


def test_force_removes_nothing_that_no_export_wrote(small: Catalog, run: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("export", "AT/run", "AT/out")[0] == 0
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    code, _, err = run("export", "AT/run", "AT/out", "--force")
    assert (code, "holds 'thesis.tex', which no export wrote" in err) == (2, True)
    code, _, err = run("export", "AT/run", "AT/out", "--force", "--format", "torch")
    assert (code, "is there and is not a file" in err) == (2, True)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    code, _, err = run("export", "AT/run", "AT/link", "--force")
    assert (code, "is there and is not a directory" in err) == (2, True)
    code, _, err = run("export", "AT/run", "AT/no/where.pt")
    assert (code, "is no directory; make it first" in err) == (2, True)


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_export_leaves_the_target_absent_or_whole_and_the_next_one_cleans_up(
    small: Catalog, run: Any, tmp_path: Path, kind: str
) -> None:
    words = ["export", f"{tmp_path}/run", *at(tmp_path, KINDS[kind])]
    target = Path(words[2])
    for point in STAGE_POINTS[:-1]:
        assert alone(words, kill_at=point).returncode == -signal.SIGKILL
        assert not target.exists()
    assert len(list(tmp_path.glob(".tmp-*"))) == 1
    assert run(*words)[0] == 0
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("point", [*IMPORT_POINTS, "catalog.generation_claimed", "commit.manifest_stored"])
def test_a_killed_import_leaves_no_checkpoint_or_a_whole_one(
    small: Catalog, run: Any, tmp_path: Path, point: str
) -> None:
    assert point in (*IMPORT_POINTS, *CATALOG_POINTS)
    run("export", "AT/run", "AT/out.pt")
    words = ["import", f"{tmp_path}/out.pt", f"{tmp_path}/new"]
    assert alone(words, kill_at=point).returncode == -signal.SIGKILL
    is_begun = point not in IMPORT_POINTS
    committed = Catalog(LocalBackend(tmp_path / "new")).committed()
    assert [info.step for info in committed] == ([0] if point.startswith("commit") else [])
    assert run(*words)[0] == (2 if is_begun else 0)
    if is_begun:
        code, said, _ = run(*words, "--force")
        assert (code, said["generation"]) == (0, 2)
    assert run("verify", "AT/new")[0] == 0
    assert not list((tmp_path / "new").glob("step-*/.tmp-*"))


def test_an_import_into_a_run_is_refused_unless_forced_and_then_loses_nothing(
    small: Catalog, run: Any, tmp_path: Path
) -> None:
    run("export", "AT/run", "AT/out.pt")
    code, _, err = run("import", "AT/out.pt", "AT/run")
    assert (code, "holds a run already" in err) == (2, True)
    code, said, _ = run("import", "AT/out.pt", "AT/run", "--force", "--step", 5)
    assert (code, said["generation"]) == (0, 2)
    listed = run("ls", "AT/run")[1]
    assert [(one["step"], one["generation"], one["on_lineage"]) for one in listed] == [
        (5, 2, True),
        (1, 1, False),
    ]
    assert run("import", "AT/out.pt", "AT/other", "--step", "-1")[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_or_a_failing_call_leaves_nothing(small: Catalog, tmp_path: Path, kind: str) -> None:
    stored = CheckpointTensors(small, 1, 1)
    chosen = choose_keys(stored.keys(), {})
    tensors, aliases = names_of(chosen, map(stored.tensor, chosen.keys.values()))
    target = str(tmp_path / "out")

    def export(files: Any) -> None:
        export_tensors(target, kind, tensors, aliases, shard_bytes=2000, files=files)  # type: ignore[arg-type]

    for after_bytes in (0, 100, 2000, 4000):
        with pytest.raises(StorageFullError):
            export(FullDiskFiles(after_bytes, inner=UnsyncedFiles()))
        assert not list(tmp_path.glob("*out*"))
    counting = FailingFiles(-1, inner=UnsyncedFiles())
    export(counting)
    for call in range(counting.num_calls):
        target = str(tmp_path / f"out-{call}")
        try:
            export(FailingFiles(call, inner=UnsyncedFiles()))
        except RelightError:
            # The last call makes the name durable: it is whole by then.
            is_late = call == counting.num_calls - 1
            assert bool(list(tmp_path.glob(f"*out-{call}"))) == is_late


def test_a_target_that_appears_meanwhile_is_not_overwritten(small: Catalog, tmp_path: Path) -> None:
    stored = CheckpointTensors(small, 1, 1)
    tensor = stored.tensor("model/w0")
    target = tmp_path / "out.safetensors"

    def advance(_: int) -> None:
        target.write_text("somebody else's")

    with pytest.raises(ConfigError, match="is there already"):
        export_tensors(str(target), "safetensors", [tensor], {}, shard_bytes=2000, advance=advance)
    assert target.read_text() == "somebody else's"
    assert not list(tmp_path.glob(".tmp-*"))


LARGE_BYTES = 300 * 2**20
BUDGET_BYTES = 4 * 16 * 2**20
"""Four blocks; on top of what the interpreter and the libraries take, which is measured beside it."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two ranks and 300 MiB, cut by rows and by columns."""
    folder = tmp_path_factory.mktemp("large")
    catalog = Catalog(LocalBackend(folder / "run", UnsyncedFiles()))
    rows = LARGE_BYTES // 2 // 4 // 4096
    content = {
        "model/rows": ("float32", (rows, 4096), os.urandom(rows * 4096 * 4)),
        "model/columns": ("float32", (4096, rows), os.urandom(rows * 4096 * 4)),
    }
    assert sum(math.prod(shape) * 4 for _, shape, _ in content.values()) == LARGE_BYTES
    layouts = {
        "model/rows": Layout.on((2,), (0, 1), ((0, 0),)),
        "model/columns": Layout.on((2,), (0, 1), ((0, 1),)),
    }
    store(catalog, content, layouts, world_size=2)
    return folder


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_bounded_by_four_blocks_and_torch_is_not_needed(large: Path, kind: str) -> None:
    words = [word for word in at(large, KINDS[kind]) if word not in ("--shard-size", "2 kB")]
    words += ["--shard-size", "100 MB"]
    target = Path(words[0])
    nothing = alone(["ls", f"{large}/run"])
    base = int(nothing.stdout.split()[-1]) * 1024
    try:
        for verb in (["export", f"{large}/run", *words], ["import", str(target), f"{large}/back-{kind}"]):
            done = alone(verb)
            assert (done.returncode, done.stderr) == (0, "")
            *_, has_torch, peak = done.stdout.split()
            assert has_torch == "False"
            assert int(peak) * 1024 - base < BUDGET_BYTES
    finally:
        for path in sorted(large.glob(f"back-{kind}/**/*")) + sorted(large.glob(f"{target.name}/*")):
            if path.is_file():
                path.unlink()
        if target.is_file():
            target.unlink()


def test_the_backend_of_a_path_and_of_a_url_are_the_same_source(
    small: Catalog, run: Any, tmp_path: Path
) -> None:
    assert run("export", f"file://{tmp_path}/run", f"file://{tmp_path}/out.pt")[0] == 0
    assert run("import", f"file://{tmp_path}/out.pt", f"file://{tmp_path}/new")[0] == 0
    assert open_backend(f"{tmp_path}/new").url == f"file://{tmp_path}/new"
