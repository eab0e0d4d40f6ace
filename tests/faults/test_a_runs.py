"""Silent wrong resume: the reports that need whole runs, ended by SIGKILL and resumed in new processes."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import relight
from relight import Checkpointer, ElasticSampler, TrainState
from relight.errors import ConfigError, OwnershipError
from relight.testing.trainers import note
from tests.running import Home

pytestmark = pytest.mark.multiprocess


class Ids(Dataset[torch.Tensor]):
    """Samples that are their own number."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class NoisyIds(Ids):
    """Samples with noise of three generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return torch.tensor([float(index), *noise])


def bits(loss: torch.Tensor) -> str:
    """Return a loss's bits."""
    return loss.item().hex()


def die() -> None:
    """End as by a power switch."""
    os.kill(os.getpid(), signal.SIGKILL)


# -- A07 ----------------------------------------------------------------------------------------------------


def a07_train(root: str, micro: int, stop: int | None) -> None:
    """Train on 32 samples with a global batch of 4, as `micro` samples at a time."""
    sampler = ElasticSampler(32, global_batch=4, shuffle=False)
    loader = DataLoader(Ids(32), batch_size=micro, sampler=sampler)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer, data=loader), every=1) as ckpt:
        step, window = ckpt.restore(), []
        total = sampler.steps_per_epoch
        note(remaining=total - step)
        for ids in loader:
            window += ids.tolist()
            model(ids[:, None].float()).mean().backward()
            if len(window) == 4:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                note(step=step, ids=window)
                window = []
                ckpt.step(step)
                if step == stop:
                    ckpt.wait()
                    die()


def test_a07_progress_is_counted_in_samples_not_in_micro_batches(home: Home) -> None:
    home.keeper()
    home.live(a07_train, root=home.root(), micro=1, stop=3, dies=True)
    (notes,) = home.live(a07_train, root=home.root(), micro=4, stop=None)
    assert notes[0] == {"remaining": 5}
    assert [entry["step"] for entry in notes[1:]] == [4, 5, 6, 7, 8]
    assert [number for entry in notes[1:] for number in entry["ids"]] == list(range(12, 32))


# -- A08 ----------------------------------------------------------------------------------------------------


def a08_train(root: str, kind: str, total: int, stop: int | None = None) -> None:
    """Train with noise from every generator in the data, and dropout in the model."""
    if stop is not None or kind == "golden":
        relight_seed = 7
        torch.manual_seed(relight_seed)
        random.seed(relight_seed)
        np.random.seed(relight_seed)  # noqa: NPY002
    loader = DataLoader(NoisyIds(32), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer, data=loader), every=1) as ckpt:
        step = ckpt.restore()
        while step < total:
            for batch in loader:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                note(step=step, ids=batch[:, 0].tolist(), loss=bits(loss))
                ckpt.step(step)
                if step == stop:
                    ckpt.wait()
                    die()
                if step == total:
                    break


@pytest.mark.parametrize("stop", [3, 8], ids=["middle-of-epoch", "end-of-epoch"])
def test_a08_noise_of_every_generator_goes_on_where_it_was(home: Home, stop: int) -> None:
    home.keeper("golden")
    (golden,) = home.live(a08_train, root=home.root("golden"), kind="golden", total=12)
    home.keeper()
    home.live(a08_train, root=home.root(), kind="first", total=12, stop=stop, dies=True)
    (resumed,) = home.live(a08_train, root=home.root(), kind="resumed", total=stop + 4)
    assert resumed == golden[stop : stop + 4]


# -- A09 ----------------------------------------------------------------------------------------------------


def a09_train(root: str, stop: int | None, seed: int) -> None:
    """Two epochs of a plain shuffling loader, with draws of the global generator between batches."""
    torch.manual_seed(seed)
    loader = DataLoader(Ids(64), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer, data=loader), every=1) as ckpt:
        step = ckpt.restore()
        while step < 32:
            for ids in loader:
                loss = model(ids[:, None].float()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                note(step=step, ids=ids.tolist(), loss=bits(loss))
                ckpt.step(step)
                if step == stop:
                    ckpt.wait()
                    die()


def test_a09_a_shuffled_epoch_goes_on_in_its_own_order(home: Home) -> None:
    home.keeper("golden")
    (golden,) = home.live(a09_train, root=home.root("golden"), stop=None, seed=1)
    home.keeper()
    (first,) = home.live(a09_train, root=home.root(), stop=16 + 5, seed=1, dies=True)
    (second,) = home.live(a09_train, root=home.root(), stop=None, seed=99)
    assert first + second == golden
    epoch = [number for entry in (first + second)[16:] for number in entry["ids"]]
    assert sorted(epoch) == list(range(64))
    assert epoch != [number for entry in golden[:16] for number in entry["ids"]]


# -- A10 ----------------------------------------------------------------------------------------------------


def a10_loader(kind: str, workers: int) -> DataLoader[torch.Tensor]:
    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers}
    if kind == "elastic":
        return DataLoader(Ids(8), sampler=ElasticSampler(8, global_batch=2, seed=5), **options)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Ids(8), shuffle=True, **options)
    return DataLoader(Ids(8), shuffle=True, **options)


def a10_train(root: str, kind: str, workers: int, when: str | None, seed: int) -> None:
    """Two epochs of 4 batches; `when` says on which side of the end of the first one to save and die."""
    torch.manual_seed(seed)
    loader = a10_loader(kind, workers)
    state = TrainState(model=nn.Linear(1, 1), data=loader)
    with Checkpointer(root, state, every=10**6) as ckpt:
        step = ckpt.restore()
        if step:
            before = state.collect(step).parts["data"]
            again = state.collect(step).parts["data"]
            note(is_stable=before == again)
        while step < 8:
            for ids in loader:
                step += 1
                note(step=step, ids=ids.tolist())
                ckpt.step(step)
                if step == 4 and when == "before":
                    ckpt.save(step)
                    ckpt.wait()
                    die()
            if step == 4 and when == "after":
                ckpt.save(step)
                ckpt.wait()
                die()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["elastic", "plain", "stateful"])
def test_a10_a_save_at_the_end_of_an_epoch_leads_to_the_next(
    home: Home, kind: str, workers: int, when: str
) -> None:
    home.keeper("golden")
    (golden,) = home.live(a10_train, root=home.root("golden"), kind=kind, workers=workers, when=None, seed=3)
    home.keeper()
    home.live(a10_train, root=home.root(), kind=kind, workers=workers, when=when, seed=3, dies=True)
    (resumed,) = home.live(a10_train, root=home.root(), kind=kind, workers=workers, when=None, seed=77)
    assert resumed == [{"is_stable": True}, *golden[4:]]
    assert sorted(number for entry in golden[4:] for number in entry["ids"]) == list(range(8))


# -- A11 ----------------------------------------------------------------------------------------------------


def a11_train(root: str, order: str, start: int | None, num: int) -> None:
    """Train with the checkpointer called on one side of `scheduler.step()`, from `start` on if it is given."""
    torch.manual_seed(0)
    sampler = ElasticSampler(12, global_batch=2, seed=1)
    loader = DataLoader(Ids(12), batch_size=2, sampler=sampler)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    with Checkpointer(root, state, every=1 if start is None else 10**6, keep=100) as ckpt:
        step = ckpt.restore(start)
        end = step + num
        while step < end:
            for ids in loader:
                loss = model(ids[:, None].float()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                note(step=step + 1, rate=optimizer.param_groups[0]["lr"], ids=ids.tolist(), loss=bits(loss))
                optimizer.step()
                step += 1
                if order == "before":
                    if start is None:
                        ckpt.save(step)
                    scheduler.step()
                else:
                    scheduler.step()
                    if start is None:
                        ckpt.save(step)
                if step == end:
                    break


@pytest.mark.parametrize("order", ["before", "after"])
def test_a11_a_save_is_one_cut_through_all_counters(home: Home, order: str) -> None:
    """A save before `scheduler.step()` is sealed at the next update, with the schedule as it is then."""
    home.keeper()
    (golden,) = home.live(a11_train, root=home.root(), order=order, start=None, num=16)
    for start in range(10, 0, -1):
        (found,) = home.live(a11_train, root=home.root(), order=order, start=start, num=6)
        assert found == golden[start : start + 6]


# -- A12 ----------------------------------------------------------------------------------------------------


def a12_train(root: str, ask_at: int | None) -> None:
    """Two epochs of 10 micro-batches in windows of 4 (the last one of an epoch has 2); asks for one save."""
    torch.manual_seed(0)
    sampler = ElasticSampler(20, global_batch=8, seed=2, drop_last=False)
    loader = DataLoader(Ids(20), batch_size=2, sampler=sampler)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer, data=loader), every=10**6) as ckpt:
        step = ckpt.restore()
        seen, asked_in = 0, None
        while step < 6:
            for at, ids in enumerate(loader, 1 + 4 * (step % 3)):
                seen += 1
                (model(ids[:, None].float()).square().mean() / 4).backward()
                is_end = at in (4, 8, 10)
                if is_end:
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                if seen == ask_at:
                    ckpt.save(step)
                    asked_in = step if is_end else step + 1
                elif is_end:
                    ckpt.step(step)
                if ask_at is not None and is_end and step == asked_in:
                    ckpt.wait()
                    note(saved=asked_in)
                    die()
    note(weights=[bits(value) for p in model.parameters() for value in p.detach().reshape(-1)])


@pytest.mark.parametrize("ask_at", range(1, 11))
def test_a12_a_save_inside_an_accumulation_window_waits_for_its_end(home: Home, ask_at: int) -> None:
    home.keeper("golden")
    (golden,) = home.live(a12_train, root=home.root("golden"), ask_at=None)
    home.keeper()
    (first,) = home.live(a12_train, root=home.root(), ask_at=ask_at, dies=True)
    assert first == [{"saved": 1 if ask_at <= 4 else 2 if ask_at <= 8 else 3}]
    deferred = [event.step for event in home.events(kind="save_deferred")]
    assert deferred == ([] if ask_at in (4, 8, 10) else [first[0]["saved"] - 1])
    (second,) = home.live(a12_train, root=home.root(), ask_at=None)
    assert second == golden


# -- A14 and A15 --------------------------------------------------------------------------------------------


def a14_run(root: str, is_first: bool) -> None:
    """Each rank draws a number of its own from a stream of its own."""
    rank = int(os.environ["RANK"])
    if is_first:
        torch.manual_seed(100 + rank)
        torch.rand(rank + 1)
    with Checkpointer(root, TrainState(model=nn.Linear(1, 1)), every=10**6) as ckpt:
        ckpt.restore()
        if is_first:
            ckpt.save(1)
            ckpt.wait()
        note(drawn=torch.rand(1).item())


def test_a14_every_rank_gets_its_own_generators_back(home: Home) -> None:
    home.keeper()
    golden = home.live(a14_run, root=home.root(), is_first=True, world_size=4)
    assert home.live(a14_run, root=home.root(), is_first=False, world_size=4) == golden
    assert len({notes[0]["drawn"] for notes in golden}) == 4


def a15_extras(*, marked: bool) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    values = {"w": torch.tensor([0, 1]) + 2 * rank, "pos": {"read": 223 - 3 * rank}}
    return {name: relight.PerRank(value) for name, value in values.items()} if marked else values


def a15_save(root: str, marked: bool) -> None:
    torch.manual_seed(0)
    ckpt = Checkpointer(root, TrainState(model=nn.Linear(1, 1), extra=a15_extras(marked=marked)))
    ckpt.restore()
    ckpt.save(1)
    try:
        ckpt.wait()
        note(error=None)
    except OwnershipError as error:
        note(error=str(error))
    try:
        ckpt.close()
    except ConfigError:
        note(closed="raised")


def a15_load(root: str) -> None:
    torch.manual_seed(0)
    mine = {"w": relight.PerRank(torch.zeros(2, dtype=torch.int64)), "pos": relight.PerRank({})}
    with Checkpointer(root, TrainState(model=nn.Linear(1, 1), extra=mine)) as ckpt:
        ckpt.restore()
    note(w=mine["w"].value.tolist(), pos=mine["pos"].value)


def test_a15_unmarked_values_that_differ_between_ranks_are_refused(home: Home) -> None:
    home.keeper()
    found = home.live(a15_save, root=home.root(), marked=False, world_size=2)
    for notes in found:
        assert "extra.pos, extra.w" in notes[0]["error"]
        assert "relight.PerRank" in notes[0]["error"]
        assert notes[1:] == [{"closed": "raised"}]
    assert home.steps() == []


def test_a15_marked_values_go_back_to_their_rank(home: Home) -> None:
    home.keeper()
    home.live(a15_save, root=home.root(), marked=True, world_size=2)
    assert home.live(a15_load, root=home.root(), world_size=2) == [
        [{"w": [0, 1], "pos": {"read": 223}}],
        [{"w": [2, 3], "pos": {"read": 220}}],
    ]
