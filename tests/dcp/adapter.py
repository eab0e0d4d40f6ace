"""Puts relight's storage under tests that were written for the files of torch.distributed.checkpoint.

Run as a program it takes a folder of such tests, runs a copy of each with relight's writer and reader in the place of
DCP's, and prints what passed::

    python -m tests.dcp.adapter FOLDER [--stock] [--strict] [-k EXPRESSION]

The copies begin with a call of `install`, so that the processes which the tests start are adapted as well. With --stock
nothing is replaced: what fails then fails for reasons of the machine. Without --strict the reader passes over keys and
converts dtypes as DCP's does, so that what is left are differences of another kind. Where there is no GPU, tests that
ask for several run on the CPU as far as they can.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

_MODE = "RELIGHT_ADAPTER"
_LINE = "from tests.dcp import adapter as _adapter; _adapter.install()\n"
_NAMES = ("FileSystemWriter", "FileSystemReader")


def install() -> None:
    """Adapt this process: CPUs for GPUs where there are none, and relight's storage for DCP's unless told otherwise."""
    if not has_gpus():
        use_cpus()
    if os.environ[_MODE] != "stock":
        use_relight(is_strict=os.environ[_MODE] == "strict")


def has_gpus() -> bool:
    """Tell whether this machine has GPUs."""
    import torch

    return torch.cuda.is_available()


def use_relight(*, is_strict: bool) -> None:
    """Let relight's writer and reader answer to the names of DCP's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils

    import relight.dcp

    allowed: dict[str, Any] = {} if is_strict else {"allow_extra": ["*"], "allow_cast": ["*"]}

    class FileSystemWriter(relight.dcp.Writer):
        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(path)

    class FileSystemReader(relight.dcp.Reader):
        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(path, **allowed)

    for name, replacement in zip(_NAMES, (FileSystemWriter, FileSystemReader), strict=True):
        # Other processes find the class by this name.
        replacement.__qualname__ = name
        globals()[name] = replacement
        for module in (dcp, filesystem, _storage_utils, format_utils):
            if hasattr(module, name):
                setattr(module, name, replacement)


def use_cpus() -> None:
    """Let tests that want GPUs have CPUs."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._shard import sharded_tensor

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common_distributed.requires_nccl = lambda: lambda test: test
    stock = sharded_tensor.with_comms

    def with_comms(func: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
        return stock(func, init_rpc=init_rpc, backend="gloo" if backend == "nccl" else backend)

    sharded_tensor.with_comms = with_comms
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self
    first = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *args: Any, **options: Any) -> None:
        first(self, *args, **{"device_id": torch.device("cpu"), **options})

    FullyShardedDataParallel.__init__ = on_cpu
    torch.cuda.set_device = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"


def on_cpus(text: str) -> str:
    """Return the text of tests with CPUs in the place of the GPUs that it names."""
    text = text.replace("cpu:gloo,cuda:nccl", "gloo")
    text = re.sub(r"cuda:(?:\d+|\{[^}]*\})", "cpu", text)
    return re.sub(r"""(["'])cuda\1""", '"cpu"', text)


def main() -> int:
    """Run the tests of a folder and print one line for each file, and one for each test that did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("-k", dest="expression")
    options = parser.parse_args()
    mode = "stock" if options.stock else "strict" if options.strict else "lenient"
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="relight-dcp-") as place:
        for path in sorted(options.folder.rglob("test_*.py")):
            found = run_file(path, Path(place), mode, options.expression)
            counts = Counter(outcome for outcome, _, _ in found)
            totals += counts
            print(f"{path.relative_to(options.folder)}: {dict(counts)}", flush=True)
            for outcome, name, why in found:
                print(f"    {outcome} {name} {why}", flush=True)
    print(f"all: {dict(totals)}")
    return 0


def run_file(path: Path, place: Path, mode: str, expression: str | None) -> list[tuple[str, str, str]]:
    """Return (outcome, test, reason) of every test of a file."""
    copy = place / path.name
    text = path.read_text() if has_gpus() else on_cpus(path.read_text())
    head = re.search(r"^(?:from (?!__future__)|import )", text, flags=re.MULTILINE)
    at = head.start() if head else 0
    copy.write_text(text[:at] + _LINE + text[at:])
    report = place / "report.xml"
    report.unlink(missing_ok=True)
    root = Path(__file__).resolve().parents[2]
    paths = [one for one in [os.environ.get("PYTHONPATH")] if one]
    environment = {
        **os.environ,
        _MODE: mode,
        "PYTHONPATH": os.pathsep.join([str(root), *paths]),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "pytest", str(copy), "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(place), f"--junitxml={report}", "--timeout=200"]
    command += ["-k", expression] if expression else []
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if not report.exists():
        return [("broken", path.name, done.stdout[-2000:] + done.stderr[-2000:])]
    return [_outcome(case) for case in ET.parse(report).iter("testcase")]


def _outcome(case: ET.Element) -> tuple[str, str, str]:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    for tag, outcome in (("failure", "failed"), ("error", "broken"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            lines = [line for line in (found.text or found.get("message") or "").splitlines() if line.strip()]
            telling = [line for line in lines if re.search(r"(Error|Exception|assert)\b", line)]
            return outcome, name, " | ".join(telling[-3:] or lines[-2:])[:700]
    return "passed", name, ""


if __name__ == "__main__":
    sys.exit(main())
