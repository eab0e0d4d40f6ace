"""A sharded load on several ranks of one machine: relight against DCP, same state, warm disk, in one run.

``python -m benchmarks.sharded`` saves a model under FSDP on 4 ranks with both engines, then loads it in new processes,
on as many ranks and on others, and prints seconds (slowest rank) and bytes read per node in whole blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.__main__ import end_keepers

HERE = Path(__file__).parent
LAYERS, WIDTH = 80, 1024
STEP = 1


def build(layout: str) -> tuple[Any, Any]:
    """Return a model and its optimizer, with all state there; spread over the ranks as `layout` says."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full_like(parameter, 0.5, requires_grad=False),
            "exp_avg_sq": torch.full_like(parameter, 0.25, requires_grad=False),
        }
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state dict that DCP's users save."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def work(what: str, engine: str, layout: str, root: str, *, out: str, repeats: int) -> None:
    """Save or load on this rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import relight
    from relight.events import read_events

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build(layout)
    times: list[float] = []
    read = 0
    if engine == "DCP":
        state = state_of(model, optimizer)
        if what == "save":
            dcp.save(state, checkpoint_id=root)
        for _ in range(repeats if what == "load" else 0):
            dist.barrier()
            started = time.perf_counter()
            dcp.load(state, checkpoint_id=root)
            dist.barrier()
            times.append(time.perf_counter() - started)
    else:
        for number in range(repeats if what == "load" else 1):
            own = root if what == "save" else f"{root}-into-{layout}-{os.environ['WORLD_SIZE']}-{number}"
            ckpt = relight.Checkpointer(
                own, relight.TrainState(model=model, optimizer=optimizer), every=10**9
            )
            # A restarted job finds its keeper; a new one's start is not what is measured.
            time.sleep(0.5)
            dist.barrier()
            started = time.perf_counter()
            ckpt.restore(source=None if what == "save" else root)
            dist.barrier()
            times.append(time.perf_counter() - started)
            if what == "save":
                ckpt.save(STEP)
                ckpt.wait(STEP)
            ckpt.close()
            if what == "load":
                done = [e for e in read_events(Path(own) / "events") if e.kind == "restore_done"]
                read = sum(int(event.fields["bytes_read"]) for event in done)
    if dist.get_rank() == 0:
        local = sum(p.numel() for p in model.parameters()) * 12
        Path(out).write_text(json.dumps({"times": times, "read": read, "state_bytes": local}))
    dist.destroy_process_group()


def run(what: str, engine: str, layout: str, root: Path, *, ranks: int, repeats: int) -> dict[str, Any]:
    """Run `work` on `ranks` processes and return what rank 0 wrote."""
    out = root.parent / "out.json"
    with __import__("socket").socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        arguments = ["work", what, engine, layout, str(root), str(out), str(repeats)]
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sharded", *arguments], env=env, cwd=HERE.parent
            )
        )
    codes = [child.wait() for child in children]
    if any(codes):
        raise SystemExit(f"{what} by {engine} failed: exit codes {codes}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def measure(base: Path, repeats: int) -> None:
    """Save under each layout with both engines, load under others, and print a line for each pair."""
    for layout in ("fsdp", "ddp"):
        for engine in ("relight", "DCP"):
            run("save", engine, layout, base / f"{layout}-{engine}", ranks=4, repeats=1)
        for target, ranks in (("fsdp", 4), ("fsdp", 3), ("fsdp", 2), ("ddp", 2)):
            pair = {
                engine: run("load", engine, target, base / f"{layout}-{engine}", ranks=ranks, repeats=repeats)
                for engine in ("relight", "DCP")
            }
            ours, theirs = (statistics.median(pair[engine]["times"]) for engine in ("relight", "DCP"))
            needed = pair["relight"]["state_bytes"]
            name = f"{layout} 4 -> {target} {ranks}"
            read = pair["relight"]["read"]
            print(
                f"{name:22} relight {ours:6.3f} s  DCP {theirs:6.3f} s  {theirs / ours:5.1f} x  "
                f"read {read / needed:4.2f} x of {needed / 1e9:.2f} GB",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:6], out=sys.argv[6], repeats=int(sys.argv[7]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=str(HERE / "scratch" / "sharded"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    base = Path(options.directory).resolve()
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    try:
        measure(base, options.repeats)
    finally:
        for root in base.iterdir():
            end_keepers(root)
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
