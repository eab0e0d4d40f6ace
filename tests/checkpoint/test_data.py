"""Data position: a run that is stopped at any step and resumed in fresh objects sees what a straight run sees."""

# ruff: noqa: NPY002 (datasets here draw from NumPy's legacy global stream, as users' do)

from __future__ import annotations

import gc
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from relight.checkpoint import context, rng
from relight.checkpoint.data import SampleId, attach_data, per_sample_rng
from relight.checkpoint.sampler import ElasticSampler
from relight.errors import ConfigError, StateMismatchError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*worker processes in total.*:UserWarning"),
    # torchdata 0.11 calls it when a loader is made.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class Ids(Dataset):
    """Sample i is i."""

    def __init__(self, size=16):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return int(index)


class Noisy(Ids):
    """Sample i is i and what each library draws for it."""

    def __getitem__(self, index):
        return torch.tensor(
            [index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64
        )


class Stream(IterableDataset):
    """An iterable that keeps its own position."""

    def __init__(self, size=16):
        self.size, self.at = size, 0

    def __iter__(self):
        worker = get_worker_info()
        stride, offset = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        while self.at * stride + offset < self.size:
            self.at += 1
            yield (self.at - 1) * stride + offset
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class GlobalShuffle(Sampler):
    """A user's sampler that shuffles with whatever global generator comes to hand."""

    def __init__(self, size=16):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        order = [order[i] for i in np.random.permutation(self.size)]
        yield from (order[i] for i in torch.randperm(self.size).tolist())


class OwnShuffle(GlobalShuffle):
    """A user's sampler with a generator of its own that lives on from epoch to epoch."""

    def __init__(self, size=16):
        super().__init__(size)
        self.rng = np.random.default_rng(3)

    def __iter__(self):
        return iter(self.rng.permutation(self.size).tolist())


def elastic(**options):
    return ElasticSampler(16, global_batch=4, seed=2, rank=0, world_size=1, **options)


def plain(**options):
    return lambda **more: DataLoader(Ids(), batch_size=2, **options, **more)


def with_sampler(make, dataset=Ids, cls=DataLoader, **options):
    return lambda **more: cls(dataset(), batch_size=2, sampler=make(), **options, **more)


def stateful(**options):
    return lambda **more: StatefulDataLoader(Ids(), batch_size=2, **options, **more)


def seeded_generator():
    return torch.Generator().manual_seed(9)


KINDS = {
    "elastic": with_sampler(elastic),
    "elastic in a stateful loader": with_sampler(elastic, cls=StatefulDataLoader),
    "elastic without batches": lambda **more: DataLoader(Ids(), batch_size=None, sampler=elastic(), **more),
    "sequential": plain(),
    "shuffle": plain(shuffle=True),
    "shuffle with a generator": lambda **more: DataLoader(
        Ids(), batch_size=2, shuffle=True, generator=seeded_generator(), **more
    ),
    "shuffle without the last batch": lambda **more: DataLoader(
        Ids(15), batch_size=2, shuffle=True, drop_last=True, **more
    ),
    "uneven shuffle": lambda **more: DataLoader(Ids(15), batch_size=2, shuffle=True, **more),
    "shuffle without batches": lambda **more: DataLoader(Ids(), batch_size=None, shuffle=True, **more),
    "replacement": with_sampler(lambda: RandomSampler(Ids(), replacement=True, num_samples=40)),
    "replacement with a generator": with_sampler(
        lambda: RandomSampler(Ids(), replacement=True, num_samples=40, generator=seeded_generator())
    ),
    "subset": with_sampler(lambda: SubsetRandomSampler(range(3, 15))),
    "weighted": with_sampler(lambda: WeightedRandomSampler([1.0 + i for i in range(16)], 14)),
    "distributed": with_sampler(
        lambda: DistributedSampler(Ids(33), num_replicas=2, rank=1), dataset=lambda: Ids(33)
    ),
    "batch sampler": lambda **more: DataLoader(
        Ids(), batch_sampler=BatchSampler(RandomSampler(Ids()), 2, drop_last=False), **more
    ),
    "custom, global generators": with_sampler(GlobalShuffle),
    "custom, own generator": with_sampler(OwnShuffle),
    "list": lambda **more: DataLoader(Ids(), batch_size=2, sampler=[5, 3, 1, 7, 9, 11], **more),
    "stateful": stateful(),
    "stateful shuffle": stateful(shuffle=True),
    "stateful shuffle with a generator": lambda **more: StatefulDataLoader(
        Ids(), batch_size=2, shuffle=True, generator=seeded_generator(), **more
    ),
    "stateful every third step": stateful(shuffle=True, snapshot_every_n_steps=3),
    "stateful uneven": lambda **more: StatefulDataLoader(Ids(15), batch_size=2, shuffle=True, **more),
    "stateful, torch's sampler": with_sampler(lambda: RandomSampler(Ids()), cls=StatefulDataLoader),
    "stateful, custom sampler": with_sampler(GlobalShuffle, cls=StatefulDataLoader),
    "stateful, distributed": with_sampler(
        lambda: StatefulDistributedSampler(Ids(), num_replicas=1, rank=0), cls=StatefulDataLoader
    ),
    "stateful batch sampler": lambda **more: StatefulDataLoader(
        Ids(), batch_sampler=BatchSampler(RandomSampler(Ids()), 2, drop_last=False), **more
    ),
}
WORKERS = {
    "0 workers": {},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def as_ids(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def stored(saved):
    """Send a captured position through the file format."""
    tensors = {}

    def put(path, tensor):
        tensors[path] = tensor.clone()
        return path

    data = context.dumps(context.encode(saved, path="data/", tensors=put))
    return context.decode(context.loads(data), tensors=tensors.__getitem__)


def train(loader, part, *, start, stop, batches_per_step, on_saved=None):
    """Run a training loop over epochs; return what each step consumed. Saves after every step."""
    step, window, consumed = start, [], []
    while step < stop:
        for batch in loader:
            window.append(as_ids(batch))
            if len(window) == batches_per_step:
                step += 1
                consumed.append(window)
                window = []
                part.on_step(step)
                if on_saved is not None:
                    on_saved(step, stored(part.capture(step)))
                if step == stop:
                    break
    return consumed


def batches_per_step_of(kind):
    return {"elastic without batches": 4}.get(kind, 2)


# Workers make a restart slow: these kinds cover every way in which a loader and its sampler meet.
WITH_WORKERS = (
    "elastic",
    "elastic in a stateful loader",
    "shuffle",
    "shuffle with a generator",
    "shuffle without batches",
    "replacement with a generator",
    "custom, global generators",
    "custom, own generator",
    "stateful shuffle",
    "stateful shuffle with a generator",
    "stateful every third step",
    "stateful, torch's sampler",
    "stateful, custom sampler",
    "stateful, distributed",
)
CASES = [(kind, "0 workers") for kind in KINDS] + [
    (kind, workers) for kind in WITH_WORKERS for workers in ("2 workers", "2 persistent workers")
]


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_resuming_at_any_step_sees_what_a_straight_run_sees(kind, workers):
    torch.manual_seed(21)
    accumulation = batches_per_step_of(kind)
    saves = {}
    loader = KINDS[kind](**WORKERS[workers])
    part = attach_data(loader, seed=4)
    expected = train(
        loader, part, start=0, stop=10, batches_per_step=accumulation, on_saved=saves.__setitem__
    )
    # With workers, the middle and both sides of an epoch's end will do.
    steps = range(1, 11) if workers == "0 workers" else (3, 4, 5)
    for step in steps:
        torch.manual_seed(21)
        fresh = KINDS[kind](**WORKERS[workers])
        # Another process has drawn differently before it restores.
        torch.rand(step), random.random()
        resumed = attach_data(fresh, seed=4)
        resumed.restore(saves[step])
        actual = train(fresh, resumed, start=step, stop=10, batches_per_step=accumulation)
        assert actual == expected[step:], f"saved at step {step}"


@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
@pytest.mark.parametrize("kind", ["elastic", "shuffle", "custom, own generator", "stateful shuffle"])
def test_resuming_again_and_again_sees_what_a_straight_run_sees(kind, workers):
    torch.manual_seed(21)
    loader = KINDS[kind](**WORKERS[workers])
    expected = train(loader, attach_data(loader, seed=4), start=0, stop=8, batches_per_step=2)
    actual, saves, step = [], {}, 0
    for stop in (1, 2, 4, 7, 8):
        torch.manual_seed(21)
        fresh = KINDS[kind](**WORKERS[workers])
        part = attach_data(fresh, seed=4)
        if step:
            part.restore(saves[step])
        actual += train(fresh, part, start=step, stop=stop, batches_per_step=2, on_saved=saves.__setitem__)
        step = stop
    assert actual == expected


@pytest.mark.parametrize("moment", ["before the loop has ended", "after the loop has ended"])
@pytest.mark.parametrize(("kind", "workers"), [case for case in CASES if case[1] != "2 persistent workers"])
def test_h_a10_a_state_at_the_last_batch_starts_the_next_epoch(kind, workers, moment):
    torch.manual_seed(21)
    loader = KINDS[kind](**WORKERS[workers])
    part = attach_data(loader, seed=4)
    accumulation = batches_per_step_of(kind)
    saved = None
    for taken, _ in enumerate(loader, 1):
        part.on_step(taken // accumulation)
        if taken == len(loader) and moment.startswith("before"):
            saved = stored(part.capture(taken // accumulation))
    saved = saved or stored(part.capture(taken // accumulation))
    expected = [as_ids(batch) for batch in loader]
    torch.manual_seed(21)
    fresh = KINDS[kind](**WORKERS[workers])
    resumed = attach_data(fresh, seed=4)
    resumed.restore(saved)
    again = stored(resumed.capture(taken // accumulation))
    if resumed.kind != "stateful":
        assert context.encode(again) == context.encode(saved)
    assert [as_ids(batch) for batch in fresh] == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("list", "sequential", "stateful")])
def test_epochs_have_different_orders(kind):
    loader = KINDS[kind]()
    part = attach_data(loader, seed=4)
    assert [as_ids(batch) for batch in loader] != [as_ids(batch) for batch in loader]
    assert part.iterators_made == 2


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_making_and_using_iterators_leaves_the_global_generators_alone(kind, workers):
    loader = KINDS[kind](**WORKERS[workers])
    part = attach_data(loader, seed=4)
    before = context.encode(rng.capture_rng())
    for step, _ in enumerate(loader, 1):
        part.capture(step // 2)
    iterator = iter(loader)
    next(iterator)
    assert context.encode(rng.capture_rng()) == before


@pytest.mark.parametrize("kind", ["elastic", "shuffle", "stateful shuffle"])
def test_an_iterator_made_before_restore_is_refused(kind):
    first = KINDS[kind]()
    part = attach_data(first, seed=4)
    saved = stored(part.capture(0))
    loader = KINDS[kind]()
    part = attach_data(loader, seed=4)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ConfigError, match=r"make the iterator after restore\(\)"):
        part.restore(saved)
    assert part.iterators_made == 1


def test_reading_a_stateful_loaders_state_first_does_not_count_as_an_iterator_in_use():
    loader = KINDS["stateful shuffle"]()
    part = attach_data(loader, seed=4)
    saved = stored(part.capture(0))
    part.restore(saved)
    assert len(list(loader)) == 8


def test_a_look_at_the_data_before_the_loop_changes_nothing():
    runs = []
    for looks in (0, 2):
        torch.manual_seed(21)
        loader = KINDS["custom, own generator"]()
        part = attach_data(loader, seed=4)
        for _ in range(looks):
            next(iter(loader))
        runs.append(train(loader, part, start=0, stop=6, batches_per_step=2))
    assert runs[0] == runs[1]


def test_a_loop_that_makes_an_iterator_per_step_resumes_too():
    def run(loader, part, start, stop, saves):
        taken = []
        for step in range(start, stop):
            taken.append(as_ids(next(iter(loader))))
            part.on_step(step + 1)
            saves[step + 1] = stored(part.capture(step + 1))
        return taken

    saves = {}
    torch.manual_seed(1)
    loader = KINDS["shuffle"]()
    expected = run(loader, attach_data(loader, seed=4), 0, 6, saves)
    fresh = KINDS["shuffle"]()
    part = attach_data(fresh, seed=4)
    part.restore(saves[3])
    assert run(fresh, part, 3, 6, {}) == expected[3:]


def test_h_a12_accumulation_over_the_end_of_an_epoch():
    saves = {}
    make = KINDS["uneven shuffle"]
    torch.manual_seed(1)
    loader = make()
    expected = train(loader, attach_data(loader, seed=4), start=0, stop=9, batches_per_step=3)
    loader = make()
    part = attach_data(loader, seed=4)
    train(loader, part, start=0, stop=9, batches_per_step=3, on_saved=saves.__setitem__)
    for step in range(1, 10):
        fresh = make()
        resumed = attach_data(fresh, seed=4)
        resumed.restore(saves[step])
        assert train(fresh, resumed, start=step, stop=9, batches_per_step=3) == expected[step:]


def test_an_epoch_without_a_single_step_still_counts():
    loader = KINDS["shuffle"]()
    part = attach_data(loader, seed=4)
    first, second = ([as_ids(batch) for batch in loader] for _ in range(2))
    assert first != second
    assert part.iterators_made == 2
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))


def test_attaching_again_starts_afresh_and_seeds_decide_the_order():
    torch.manual_seed(1)
    loader = KINDS["shuffle"]()
    orders = []
    for torch_seed, seed in ((1, 4), (1, 4), (1, 5), (2, 4)):
        torch.manual_seed(torch_seed)
        part = attach_data(loader, seed=seed)
        orders.append([as_ids(batch) for batch in loader])
        assert part.iterators_made == 1
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders}) == 3


def test_a_loader_whose_part_is_gone_works_as_before():
    loader = KINDS["shuffle"]()
    untouched = dict(vars(loader))
    part = attach_data(loader, seed=4)
    assert sorted(sample for batch in loader for sample in as_ids(batch)) == list(range(16))
    del part
    assert sorted(sample for batch in loader for sample in as_ids(batch)) == list(range(16))
    assert vars(loader) == untouched


@pytest.mark.parametrize("kind", ["elastic", "shuffle", "stateful"])
def test_a_dropped_loader_stops_its_workers_at_once(kind):
    gc.disable()
    loader = KINDS[kind](num_workers=1, persistent_workers=True)
    part = attach_data(loader, seed=4)
    iterator = iter(loader)
    next(iterator)
    worker = iterator._workers[0]
    del iterator, loader, part
    gc.enable()
    assert not worker.is_alive()


def test_the_wrapped_sampler_still_looks_like_itself():
    loader = KINDS["shuffle"]()
    part = attach_data(loader, seed=4)
    assert (len(loader), len(loader.batch_sampler), loader.batch_size) == (8, 8, 2)
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (2, False)
    assert isinstance(loader.batch_sampler.sampler, RandomSampler)
    assert len(list(loader.batch_sampler)) == 8
    assert part.iterators_made == 0


def test_h_a07_changed_micro_batch_and_accumulation_go_on_with_the_same_samples():
    def make(micro):
        sampler = ElasticSampler(32, global_batch=4, shuffle=False)
        return DataLoader(Ids(32), batch_size=micro, sampler=sampler)

    loader = make(1)
    part, saves = attach_data(loader, seed=0), {}
    train(loader, part, start=0, stop=3, batches_per_step=4, on_saved=saves.__setitem__)
    fresh = make(4)
    resumed = attach_data(fresh, seed=0)
    resumed.restore(saves[3])
    ids = train(fresh, resumed, start=3, stop=8, batches_per_step=1)
    assert [sample for step in ids for batch in step for sample in batch] == list(range(12, 32))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_may_change_between_save_and_load(world_size):
    def make(rank, size):
        sampler = ElasticSampler(24, global_batch=8, seed=3, rank=rank, world_size=size)
        return DataLoader(Ids(24), batch_size=1, sampler=sampler)

    def run(start, stop, size, saved):
        by_rank, captured = [], []
        for rank in range(size):
            loader = make(rank, size)
            part = attach_data(loader, seed=0)
            assert not part.per_rank
            if saved is not None:
                part.restore(saved)
            by_rank.append(train(loader, part, start=start, stop=stop, batches_per_step=8 // size))
            captured.append(stored(part.capture(stop)))
        assert all(item == captured[0] for item in captured)
        steps = zip(*by_rank, strict=True)
        return [[i for window in step for batch in window for i in batch] for step in steps], captured[0]

    expected, _ = run(0, 7, 1, None)
    first, saved = run(0, 4, 2, None)
    second, _ = run(4, 7, world_size, saved)
    assert first + second == expected


def test_a_loader_batch_that_does_not_divide_the_global_batch_is_refused():
    loader = DataLoader(Ids(), batch_size=8, sampler=elastic())
    part = attach_data(loader, seed=0)
    with pytest.raises(ConfigError, match="batch_size=8 does not divide"):
        iter(loader)
    assert part.iterators_made == 0


@pytest.mark.parametrize(("global_batch", "word"), [(4, "more"), (16, "fewer")])
@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
def test_a_global_batch_that_contradicts_consumption_is_refused(global_batch, word, workers):
    sampler = ElasticSampler(400, global_batch=global_batch)
    loader = DataLoader(Ids(400), batch_size=2, sampler=sampler, **WORKERS[workers])
    part = attach_data(loader, seed=0)
    with pytest.raises(ConfigError, match=f"taken {word} samples"):
        train(loader, part, start=0, stop=40, batches_per_step=4)


def test_prefetchers_of_the_loop_raise_no_false_alarm():
    def ahead(loader, depth):
        queue = []
        for batch in loader:
            queue.append(batch)
            if len(queue) > depth:
                yield queue.pop(0)
        yield from queue

    for depth in (1, 2, 8):
        loader = DataLoader(Ids(40), batch_size=2, sampler=ElasticSampler(40, global_batch=4))
        part = attach_data(loader, seed=0)
        step = 0
        for _ in range(3):
            for window, _ in enumerate(ahead(loader, depth), 1):
                if window % 2 == 0:
                    step += 1
                    part.on_step(step)
        assert step == 30


def test_a_prefetcher_over_the_end_of_an_epoch_resumes_exactly():
    def endless(loader):
        while True:
            yield from loader

    def run(start, stop, saved):
        loader = KINDS["elastic"]()
        part = attach_data(loader, seed=0)
        if saved is not None:
            part.restore(saved)
        source, taken = endless(loader), []
        queue = [next(source) for _ in range(3)]
        for step in range(start, stop):
            window = []
            for _ in range(2):
                window.append(as_ids(queue.pop(0)))
                queue.append(next(source))
            taken.append(window)
            part.on_step(step + 1)
        return taken, stored(part.capture(stop))

    expected, _ = run(0, 10, None)
    for stop in range(1, 10):
        first, saved = run(0, stop, None)
        assert first + run(stop, 10, saved)[0] == expected


def test_a_prefetching_thread_may_run_as_far_ahead_as_it_likes():
    loader = DataLoader(Ids(400), batch_size=2, sampler=ElasticSampler(400, global_batch=4))
    part = attach_data(loader, seed=0)
    thread = threading.Thread(target=lambda: list(loader))
    thread.start()
    thread.join()
    for step in range(1, 101):
        part.on_step(step)


def test_the_tail_that_a_batch_sampler_drops_is_no_contradiction():
    sampler = ElasticSampler(19, global_batch=4, drop_last=False)
    loader = DataLoader(Ids(19), batch_size=2, sampler=sampler, drop_last=True)
    part = attach_data(loader, seed=0)
    step = 0
    for _ in range(2):
        for index, _ in enumerate(loader, 1):
            if index % 2 == 0 or index == len(loader):
                step += 1
                part.on_step(step)
    assert step == 10


def test_a_bare_elastic_sampler_counts_steps():
    sampler = elastic()
    part = attach_data(sampler, seed=0)
    loader = DataLoader(Ids(), batch_size=2, sampler=sampler)
    saves = {}
    expected = train(loader, part, start=0, stop=10, batches_per_step=2, on_saved=saves.__setitem__)
    for step in range(1, 10):
        fresh = elastic()
        resumed = attach_data(fresh, seed=0)
        resumed.restore(saves[step])
        loader = DataLoader(Ids(), batch_size=2, sampler=fresh)
        assert train(loader, resumed, start=step, stop=10, batches_per_step=2) == expected[step:]
    with pytest.raises(ConfigError, match="make the iterator after"):
        part.restore(saves[3])


class Counter:
    """A minimal loader with a state."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "tensor": torch.tensor([self.at])}

    def load_state_dict(self, state):
        self.at = state["at"]


class GrainLike:
    """An iterator in the manner of Grain."""

    def __init__(self):
        self.at = 0

    def get_state(self):
        return b"%d" % self.at

    def set_state(self, state):
        self.at = int(state)


@pytest.mark.parametrize("cls", [Counter, GrainLike])
def test_anything_with_a_state_plugs_in_per_rank(cls):
    data = cls()
    part = attach_data(data, seed=0)
    data.at = 7
    saved = stored(part.capture(3))
    fresh = cls()
    resumed = attach_data(fresh, seed=0)
    resumed.restore(saved)
    assert (fresh.at, resumed.per_rank, resumed.kind) == (7, True, "stateful")


@pytest.mark.parametrize("workers", WORKERS)
def test_a_stateful_iterable_resumes(workers):
    def make():
        return StatefulDataLoader(Stream(), batch_size=2, **WORKERS[workers])

    loader = make()
    part, saves = attach_data(loader, seed=0), {}
    expected = train(loader, part, start=0, stop=10, batches_per_step=2, on_saved=saves.__setitem__)
    for step in (1, 4, 6, 9):
        fresh = make()
        resumed = attach_data(fresh, seed=0)
        resumed.restore(saves[step])
        assert train(fresh, resumed, start=step, stop=10, batches_per_step=2) == expected[step:]


def test_a_stateful_loader_cannot_change_its_workers():
    loader = KINDS["stateful"]()
    saved = stored(attach_data(loader, seed=0).capture(0))
    other = attach_data(KINDS["stateful"](num_workers=2), seed=0)
    with pytest.raises(ConfigError, match="num_workers=0, this loader has 2"):
        other.restore(saved)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(Stream()), "StatefulDataLoader"),
        ([1, 2, 3], "cannot be a list"),
        (None, "NoneType"),
        (torch.Generator(), "Generator"),
        (DataLoader(Ids(), num_workers=2, in_order=False), "in_order"),
        (DataLoader(Ids(4), sampler=ElasticSampler(8, global_batch=4)), "dataset has only 4"),
        (DataLoader(Subset(per_sample_rng(Ids(), 0), [1, 2])), "outermost"),
    ],
)
def test_what_has_no_position_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        attach_data(data, seed=0)


@pytest.mark.parametrize("kind", ["elastic", "shuffle", "stateful"])
def test_a_position_of_another_kind_is_refused(kind):
    part = attach_data(KINDS[kind](), seed=0)
    saved = stored(part.capture(0)) | {"kind": "other"}
    with pytest.raises(StateMismatchError, match="'other'"):
        attach_data(KINDS[kind](), seed=0).restore(saved)


def test_a_changed_batch_size_converts_by_samples_or_is_refused():
    loader = DataLoader(Ids(24), batch_size=2)
    part, saves = attach_data(loader, seed=0), {}
    train(loader, part, start=0, stop=5, batches_per_step=1, on_saved=saves.__setitem__)
    assert part.settings()["batch_size"] == 2
    fresh = DataLoader(Ids(24), batch_size=4)
    resumed = attach_data(fresh, seed=0)
    resumed.restore(saves[4])
    assert as_ids(next(iter(fresh))) == [8, 9, 10, 11]
    with pytest.raises(ConfigError, match="5 batches of 2"):
        attach_data(DataLoader(Ids(24), batch_size=4), seed=0).restore(saves[5])


def test_a_dataset_that_shrank_below_the_position_is_refused():
    loader = DataLoader(Ids(24), batch_size=2)
    part, saves = attach_data(loader, seed=0), {}
    train(loader, part, start=0, stop=8, batches_per_step=1, on_saved=saves.__setitem__)
    fresh = DataLoader(Ids(10), batch_size=2)
    resumed = attach_data(fresh, seed=0)
    resumed.restore(saves[8])
    with pytest.raises(ConfigError, match="now has only 5"):
        list(fresh)


@pytest.mark.parametrize("kind", ["elastic", "shuffle", "stateful"])
def test_positions_describe_themselves(kind):
    part = attach_data(KINDS[kind](), seed=0)
    line = part.describe(part.capture(0))
    assert "epoch 0" in line
    assert "\n" not in line


NOISY = {
    "elastic": with_sampler(elastic, dataset=lambda: per_sample_rng(Noisy(), 5)),
    "shuffle": lambda **more: DataLoader(per_sample_rng(Noisy(), 5), batch_size=2, shuffle=True, **more),
    "no batches": lambda **more: DataLoader(
        per_sample_rng(Noisy(), 5), batch_size=None, shuffle=True, **more
    ),
    "stateful": lambda **more: StatefulDataLoader(
        per_sample_rng(Noisy(), 5), batch_size=2, shuffle=True, **more
    ),
}


@pytest.mark.parametrize("kind", NOISY)
def test_per_sample_noise_depends_neither_on_workers_nor_on_restarts(kind):
    runs = {}
    for workers, options in WORKERS.items():
        torch.manual_seed(21)
        loader = NOISY[kind](**options)
        part, saves = attach_data(loader, seed=4), {}
        expected = train(loader, part, start=0, stop=10, batches_per_step=2, on_saved=saves.__setitem__)
        runs[workers] = expected
        for step in (4, 7) if workers != "0 workers" else range(1, 10):
            fresh = NOISY[kind](**options)
            resumed = attach_data(fresh, seed=4)
            resumed.restore(saves[step])
            assert train(fresh, resumed, start=step, stop=10, batches_per_step=2) == expected[step:]
    if kind != "stateful":  # torchdata draws another shuffle with workers than without
        assert runs["0 workers"] == runs["2 workers"] == runs["2 persistent workers"]


def test_per_sample_noise_differs_by_sample_epoch_and_seed_and_leaves_global_generators_alone():
    dataset, other = per_sample_rng(Noisy(), 5), per_sample_rng(Noisy(), 6)
    before = context.encode(rng.capture_rng())
    samples = [dataset[SampleId(i, epoch)] for i in range(3) for epoch in range(3)] + [other[0]]
    assert context.encode(rng.capture_rng()) == before
    noise = [value for sample in samples for value in sample[1:].tolist()]
    assert len(set(noise)) == len(noise)
    assert torch.equal(dataset[1], dataset[SampleId(1, 0)])
    assert torch.equal(dataset.__getitems__([2, SampleId(1, 2)])[1], dataset[SampleId(1, 2)])


def test_a_per_sample_dataset_keeps_its_length_and_attributes_and_needs_integer_ids():
    dataset = per_sample_rng(Noisy(7), 5)
    assert (len(dataset), dataset.size) == (7, 7)
    with pytest.raises(ConfigError, match="map-style"):
        per_sample_rng(Stream(), 5)
    loader = DataLoader(per_sample_rng({"a": 1}, 5), batch_size=None, sampler=["a"])
    part = attach_data(loader, seed=0)
    with pytest.raises(ConfigError, match="integer sample ids"):
        next(iter(loader))
    assert part.kind == "loader"


def test_h_a08_noise_after_a_resume_is_that_of_the_straight_run():
    """Noise from the global generators: without workers, restoring the RNG part is enough, since nothing is skipped."""

    def run(start, stop, saved):
        loader = DataLoader(Noisy(), batch_size=2, shuffle=True)
        part = attach_data(loader, seed=4)
        if saved is not None:
            part.restore(saved[0])
            rng.restore_rng(saved[1])
        saves = {}

        def save(step, position):
            saves[step] = (position, stored(rng.capture_rng()))

        return train(loader, part, start=start, stop=stop, batches_per_step=2, on_saved=save), saves

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected, saves = run(0, 10, None)
    for step in range(1, 10):
        assert run(step, 10, saves[step])[0] == expected[step:]


def test_h_a09_the_union_of_both_parts_of_an_epoch_is_the_dataset():
    def make():
        return DataLoader(Ids(64), batch_size=4, shuffle=True)

    loader = make()
    part, saves = attach_data(loader, seed=4), {}
    first = train(loader, part, start=0, stop=21, batches_per_step=1, on_saved=saves.__setitem__)
    torch.rand(7)
    fresh = make()
    resumed = attach_data(fresh, seed=4)
    resumed.restore(saves[21])
    second = train(fresh, resumed, start=21, stop=32, batches_per_step=1)
    ids = [sample for window in first[16:] + second for batch in window for sample in batch]
    assert sorted(ids) == list(range(64))


def test_sequential_loaders_with_a_plain_sequential_sampler_stay_in_order():
    loader = DataLoader(Ids(6), batch_size=2, sampler=SequentialSampler(Ids(6)))
    part = attach_data(loader, seed=4)
    assert part.settings()["sampler"] == "SequentialSampler"
    assert [as_ids(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]
