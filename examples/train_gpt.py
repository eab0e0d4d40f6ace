"""Train a byte-level GPT on the source files of Python's own standard library.

    python examples/train_gpt.py                             one process, checkpoints under runs/gpt
    torchrun --nproc-per-node 2 examples/train_gpt.py        data parallel
    python examples/train_gpt.py --plain                     torch alone, no checkpoints

Kill it at any moment and type the same command again: it goes on from the newest snapshot, bit for bit.
What that takes is in the two `else` branches of `main`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import math
import os
import pathlib
import struct
import sysconfig
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def python_source(context: int, limit_bytes: int) -> torch.Tensor:
    """Return the standard library's source as uint8 windows, shape (windows, context + 1)."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        shape = {"d_model": width, "nhead": heads, "dim_feedforward": 4 * width, "dropout": dropout}
        style = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**shape, **style) for _ in range(depth))
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="torch alone, no checkpoints")
    parser.add_argument("--checkpoints", default="runs/gpt", help="path or URL of the run (%(default)s)")
    parser.add_argument("--every", default="20", help="a number of steps (%(default)s), '10m' or 'auto'")
    parser.add_argument("--log-file", help="append a JSON line per step and rank to this file, not to stdout")
    parser.add_argument("--digest-file", default=os.devnull, help="write the SHA-256 of the final weights")
    run = {"steps": 200, "batch": 32, "accumulate": 1, "workers": 0, "warmup": 10, "lr": 1e-3, "seed": 0}
    size = {"width": 384, "depth": 6, "heads": 6, "context": 128, "dropout": 0.1, "text-bytes": 8_000_000}
    for name, value in (run | size).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help="%(default)s")
    return parser.parse_args()


def train_step(model, batches, optimizer, scheduler, accumulate: int) -> float:
    total = 0.0
    for part in range(accumulate):
        model.require_backward_grad_sync = part == accumulate - 1  # what DDP's no_sync() sets
        windows = next(batches)
        logits, targets = model(windows[:, :-1]), windows[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / accumulate
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return total.item()


def log_step(file, step: int, rank: int, loss: float) -> None:
    line = {"step": step, "rank": rank, "loss": loss, "bits": struct.pack(">f", loss).hex()}
    print(json.dumps(line | {"at": time.time(), "pid": os.getpid()}), file=file, flush=True)


def digest_of(model: nn.Module) -> str:
    state = sorted(model.state_dict().items())
    return hashlib.sha256(b"".join(k.encode() + v.cpu().numpy().tobytes() for k, v in state)).hexdigest()


def main() -> None:
    args = parse_args()
    rank, world, local = (int(os.environ.get(key, "0")) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device(f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    logging.basicConfig(level=logging.WARNING if rank else logging.INFO, format="%(message)s")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed for determinism on GPUs
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.depth, args.heads, args.context, args.dropout).to(device)
    if world:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # every rank draws its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def warmup_and_cosine(step: int) -> float:
        return min(1, (step + 1) / (args.warmup + 1)) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_and_cosine)
    source = python_source(args.context, args.text_bytes)
    if args.plain:
        sampler = DistributedSampler(source, max(1, world), rank, seed=args.seed, drop_last=True)
    else:
        import relight

        sampler = relight.ElasticSampler(len(source), global_batch=args.batch, seed=args.seed)
    micro_batch = args.batch // max(1, world) // args.accumulate
    loader = DataLoader(source, micro_batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    batches = (windows.to(device).long() for _ in itertools.count() for windows in loader)
    log = open(args.log_file, "a") if args.log_file else None  # noqa: SIM115
    training = (model, batches, optimizer, scheduler, args.accumulate)

    if args.plain:
        for step in range(args.steps):
            log_step(log, step + 1, rank, train_step(*training))
    else:
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
        settings = {"steps": args.steps, "batch": args.batch, "lr": args.lr, "seed": args.seed}
        state = relight.TrainState(**parts, settings=settings)
        every = int(args.every) if args.every.isdigit() else args.every
        with relight.Checkpointer(args.checkpoints, state, every=every) as checkpointer:
            for step in range(checkpointer.restore(), args.steps):
                loss = train_step(*training)
                log_step(log, step + 1, rank, loss)
                checkpointer.step(step + 1, loss=loss)
    if rank == 0:
        pathlib.Path(args.digest_file).write_text(digest_of(model) + "\n")
    if world:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
