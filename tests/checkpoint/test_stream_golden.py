"""The golden rule with a FileStream: run, be killed, restore in a new process; same records, losses, weights, draws."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import relight
from relight.cli import main
from relight.errors import ConfigError, SettingsChangedError
from relight.testing.trainers import note
from tests.running import Home, restore_once, save_once

pytestmark = pytest.mark.multiprocess

TOTAL = 14
"""Steps of a whole run; an epoch has 5 of 8 records, and 3 records that fill none."""


def parse(line: bytes) -> tuple[int, torch.Tensor]:
    """Return the record's number and a noisy sample."""
    return int(line), torch.full((4,), int(line) / 64) + torch.rand(4) / 8


def train(
    root: str,
    files: str,
    *,
    workers: int = 0,
    accumulate: int = 1,
    kill_step: int | None = None,
    bare: bool = False,
) -> None:
    """Train to the last step, or until killed at the end of `kill_step`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    net = nn.parallel.DistributedDataParallel(net) if world_size > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    stream = relight.FileStream(
        files, global_batch=8, seed=3, shuffle_files=True, shuffle_window=6, transform=parse
    )
    micro = 8 // world_size // accumulate
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(stream, batch_size=micro, num_workers=workers, **options)
    data = stream if bare else loader
    state = relight.TrainState(model=net, optimizer=optimizer, data=data)
    with relight.Checkpointer(root, state, every=1, keep=100) as ckpt:
        step = ckpt.restore()
        note(restored=step)
        if step == 0:
            torch.manual_seed(100 + rank)
        while step < TOTAL:
            ids: list[int] = []
            losses: list[str] = []
            for index, x in _in_batches(stream, micro) if bare else loader:
                ids += index.tolist()
                loss = net(x).square().mean() / accumulate
                loss.backward()
                losses.append(loss.item().hex())
                if len(losses) < accumulate:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                weights = [value.double().sum().item().hex() for value in net.state_dict().values()]
                note(step=step, ids=ids, losses=losses, weights=weights, draw=torch.rand(1).item())
                ids, losses = [], []
                if step != kill_step:
                    ckpt.step(step)
                else:
                    ckpt.save(step)
                    ckpt.wait()
                    if dist.is_initialized():
                        dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == TOTAL:
                    break


def _in_batches(stream: relight.FileStream, size: int) -> Any:
    held: list[tuple[int, torch.Tensor]] = []
    for record in stream:
        held.append(record)
        if len(held) == size:
            yield torch.tensor([index for index, _ in held]), torch.stack([x for _, x in held])
            held = []


@pytest.fixture
def files(tmp_path: Path) -> str:
    """43 records in 6 files."""
    (tmp_path / "files").mkdir()
    first = 0
    for at, count in enumerate((9, 0, 13, 4, 12, 5)):
        lines = [b"%d\n" % number for number in range(first, first + count)]
        (tmp_path / "files" / f"part-{at}.txt").write_bytes(b"".join(lines))
        first += count
    return str(tmp_path / "files" / "*.txt")


def golden(home: Home, files: str, world_size: int = 1, **options: Any) -> list[list[dict[str, Any]]]:
    home.keeper("golden")
    ranks = home.live(train, root=home.root("golden"), files=files, world_size=world_size, **options)
    assert [notes[0] for notes in ranks] == [{"restored": 0}] * world_size
    return [notes[1:] for notes in ranks]


def compare(expected: list[list[dict[str, Any]]], ranks: list[list[dict[str, Any]]], start: int) -> None:
    for told, notes in zip(expected, ranks, strict=True):
        assert notes[0] == {"restored": start}
        assert notes[1:] == told[start : start + len(notes) - 1]


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"workers": 2}, {"workers": 2, "accumulate": 4}, {"bare": True}], ids=str
)
def test_killed_in_the_middle_and_at_the_end_of_an_epoch(
    home: Home, files: str, options: dict[str, Any]
) -> None:
    expected = golden(home, files, **options)
    home.keeper()
    for start, kill_step in ((0, 3), (3, 5), (5, 6)):
        life = home.live(train, root=home.root(), files=files, dies=True, kill_step=kill_step, **options)
        compare(expected, life, start)
    last = home.live(train, root=home.root(), files=files, **options)
    compare(expected, last, 6)
    assert last[0][-1]["step"] == TOTAL


def test_resumed_with_another_number_of_workers(home: Home, files: str) -> None:
    expected = golden(home, files)
    home.keeper()
    for start, kill_step, workers in ((0, 4, 2), (4, 7, 0), (7, 9, 1)):
        options = {"dies": True, "kill_step": kill_step, "workers": workers}
        compare(expected, home.live(train, root=home.root(), files=files, **options), start)
    compare(expected, home.live(train, root=home.root(), files=files, workers=3), 9)


def test_two_ranks_together_see_what_one_sees(home: Home, files: str) -> None:
    alone = golden(home, files)[0]
    home.keeper()
    first = home.live(train, root=home.root(), files=files, world_size=2, dies=True, kill_step=4, workers=2)
    second = home.live(train, root=home.root(), files=files, world_size=2)
    assert [notes[0] for notes in second] == [{"restored": 4}] * 2
    by_rank = [[*before[1:], *after[1:]] for before, after in zip(first, second, strict=True)]
    ids = [left["ids"] + right["ids"] for left, right in zip(*by_rank, strict=True)]
    assert ids == [told["ids"] for told in alone]


def test_show_prints_file_and_record(home: Home, files: str, capsys: pytest.CaptureFixture[str]) -> None:
    home.keeper()
    home.live(train, root=home.root(), files=files, dies=True, kill_step=4)
    stream = relight.FileStream(files, global_batch=8, seed=3, shuffle_files=True, shuffle_window=6)
    stream.advance_to(4)
    position = stream.state_at(4)
    assert main(["show", home.root()]) == 0
    data = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("data:"))
    shown = dict(pair.split("=") for pair in data.removeprefix("data:").strip().split(", "))
    names = ("step", "epoch", "samples_in_epoch", "file", "record", "byte", "in_window")
    assert {name: shown[name] for name in names} == {name: str(position[name]) for name in names}
    assert shown["file"].startswith("part-")
    assert set(shown) == {*names, "kind", "step_in_epoch", "consumed_samples", "global_batch"}


def test_resumed_on_other_numbers_of_ranks_and_workers(home: Home, files: str) -> None:
    alone = golden(home, files)[0]
    home.keeper()
    seen: list[list[int]] = []
    for start, kill_step, world_size, workers in ((0, 4, 2, 0), (4, 7, 4, 2), (7, None, 1, 1)):
        options = {"world_size": world_size, "workers": workers, "kill_step": kill_step}
        ranks = home.live(train, root=home.root(), files=files, dies=kill_step is not None, **options)
        assert [notes[0] for notes in ranks] == [{"restored": start}] * world_size
        steps = zip(*(notes[1:] for notes in ranks), strict=True)
        seen += [[index for told in step for index in told["ids"]] for step in steps]
    assert seen == [told["ids"] for told in alone]


def test_a_changed_file_is_refused_unless_allowed(home: Home, files: str, tmp_path: Path) -> None:
    def state() -> relight.TrainState:
        net = nn.Linear(1, 1)
        stream = relight.FileStream(files, global_batch=4)
        return relight.TrainState(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data=stream)

    save_once(home, state(), step=3)
    (tmp_path / "files" / "part-2.txt").write_bytes(b"changed\n")
    with pytest.raises(SettingsChangedError, match=r"data\.files '6 files, \d+ bytes, names and sizes"):
        restore_once(home, state())
    allowed = state()
    with pytest.raises(ConfigError, match=r"at record 3 of part-2\.txt, which hangs on the first 3 files"):
        restore_once(home, allowed, allow_changed=("data.files",))
    (tmp_path / "files" / "part-2.txt").write_bytes(b"".join(b"%d\n" % number for number in range(9, 22)))
    (tmp_path / "files" / "part-9.txt").write_bytes(b"99\n")
    assert restore_once(home, state(), allow_changed=("data.files",)) == 3
