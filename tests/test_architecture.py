"""The rules of the house, checked on the source itself: layers, sizes, names, torch, exceptions, public names."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import relight

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src" / "relight"
FILES = sorted(SOURCE.rglob("*.py"))

MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 60
FORBIDDEN_STEMS = {"base", "common", "helper", "helpers", "manager", "util", "utils", "misc"}

# Packages that may import torch; everything else runs on a machine without it.
TORCH_PACKAGES = {"checkpoint", "testing"}

# Modules that are only imported for what torch is needed for; they import it through the packages above.
LOADING_TORCH = TORCH_PACKAGES | {"dcp"}

# Thread and stage boundaries that may catch everything, since they record it: file (below src/relight) -> reason.
# A handler that ends in a bare `raise` needs no entry.
BROAD_EXCEPT_ALLOWED = {
    "checkpoint/candidates.py": "what stops one rank is told to the others, then raised",
    "checkpoint/dcp_image.py": "whatever the bytes of a user's planner raise is told as a value without a codec",
    "checkpoint/saver.py": "the snapshot thread: recorded as an event, raised in the training thread",
    "checkpoint/transfer.py": "reading threads: raised again in the thread that waits for them",
    "keeper/__main__.py": "the end of the keeper's process: written to its log, told by the exit code",
    "keeper/crew.py": "the boundary of a task: logged and reported, so that one bad task ends no thread",
    "keeper/drain.py": "the drain of one snapshot: every tier that waits for it is told that it failed",
    "testing/kills.py": "the end of a test process: shown in its output, told by the exit code",
    "testing/trainers.py": "the end of a test process: shown in its output, told by the exit code",
}

# Modules that read pickled bytes or run code from data.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}

TEXT_SUFFIXES = {
    "",
    ".cfg",
    ".css",
    ".html",
    ".js",
    ".json",
    ".md",
    ".py",
    ".sh",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}
# Put together here, so that this file does not hold what it forbids.
MACHINE_PATHS = re.compile(
    "|".join(["/" + "work/", "/" + "tmp/w/", "/" + "root/", r"\b" + r"pypi\.org", "python" + "hosted"])
)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def modules_without_torch() -> list[str]:
    names = [
        module.name for module in pkgutil.walk_packages(relight.__path__, "relight.", onerror=lambda _: None)
    ]
    kept = [name for name in names if name.split(".")[1] not in LOADING_TORCH]
    return ["relight", *(name for name in kept if not name.endswith("__main__"))]


def imported_roots(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def broad_handlers(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each handler that catches everything and does not raise it again."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        is_broad = any(
            c is None or (isinstance(c, ast.Name) and c.id in {"Exception", "BaseException"}) for c in caught
        )
        last = node.body[-1]
        if is_broad and not (isinstance(last, ast.Raise) and last.exc is None):
            yield node.lineno


def public_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


def public_order(name: str) -> tuple[int, str]:
    """Order constants before classes before functions, each by name, as the linter does."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def tracked_files() -> list[Path]:
    """Return every file of the repository that is not ignored; all of them where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [REPOSITORY / name for name in listing.stdout.decode().split("\0") if name]
    else:
        top = [path for path in REPOSITORY.iterdir() if not path.name.startswith(".") or path.name == ".ci"]
        paths = [below for path in top for below in (path.rglob("*") if path.is_dir() else [path])]
    return [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]


def test_layers_hold() -> None:
    command = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run(
        [command, "--no-cache", "--no-logo"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_short_enough_to_read() -> None:
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_every_function_is_short_enough_to_read() -> None:
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_files_are_named_by_what_they_hold() -> None:
    assert [name_of(path) for path in FILES if path.stem in FORBIDDEN_STEMS] == []


def test_every_module_says_what_it_holds() -> None:
    assert [
        name_of(path) for path in FILES if path.stat().st_size and not ast.get_docstring(tree_of(path))
    ] == []


def test_source_is_ascii() -> None:
    assert [name_of(path) for path in FILES if not path.read_bytes().isascii()] == []


def test_torch_is_imported_only_where_tensors_are() -> None:
    torch = {"torch", "torchdata", "torchvision"}
    importing = [name_of(path) for path in FILES if torch & set(imported_roots(tree_of(path)))]
    assert [name for name in importing if name.partition("/")[0] not in TORCH_PACKAGES] == []


def test_importing_everything_else_loads_no_torch() -> None:
    lines = ["import importlib, sys"]
    lines += [f"importlib.import_module({name!r})" for name in modules_without_torch()]
    lines += ["print(sorted({'torch'} & set(sys.modules)))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_nothing_reads_pickled_bytes() -> None:
    importing = [name_of(path) for path in FILES if FORBIDDEN_IMPORTS & set(imported_roots(tree_of(path)))]
    assert importing == []


def test_only_named_boundaries_catch_everything() -> None:
    found = {name_of(path): list(broad_handlers(tree_of(path))) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines and name not in BROAD_EXCEPT_ALLOWED} == {}


def test_the_list_of_boundaries_has_no_stale_entry() -> None:
    found = {name_of(path) for path in FILES if any(broad_handlers(tree_of(path)))}
    assert sorted(set(BROAD_EXCEPT_ALLOWED) - found) == []


@pytest.mark.parametrize(
    "path", [path for path in FILES if public_names(tree_of(path)) is not None], ids=name_of
)
def test_public_names_are_sorted_and_exist(path: Path) -> None:
    names = public_names(tree_of(path))
    assert names == sorted(set(names or []), key=public_order)
    module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    if module.split(".")[1:2] and module.split(".")[1] in LOADING_TORCH:
        pytest.importorskip("torch")
    loaded = importlib.import_module(module)
    assert [name for name in names or [] if not hasattr(loaded, name)] == []


def test_no_file_names_a_machine() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in tracked_files()
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
        )
        if MACHINE_PATHS.search(line)
    ]
    assert found == []
