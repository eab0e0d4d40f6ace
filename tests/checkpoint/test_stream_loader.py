"""FileStream in a DataLoader: handed over as data=, neither order nor position depends on workers, batches or ranks."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from relight.checkpoint import context, rng
from relight.checkpoint.data import attach_data
from relight.checkpoint.stream import FileStream
from relight.errors import ConfigError, StateMismatchError, StorageUnavailableError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*worker processes in total.*:UserWarning"),
    # torchdata 0.11 calls it when a loader is made.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

WORKERS = {
    "0 workers": {},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}
ORDERS = {
    "lines": {},
    "shuffled": {"shuffle_files": True, "shuffle_window": 7},
    "with the last": {"shuffle_window": 5, "drop_last": False},
    "fixed": {"records": 3, "shuffle_files": True},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """22 records in 5 files."""
    folder = tmp_path_factory.mktemp("files")
    numbers = iter(range(22))
    for at, count in enumerate((6, 0, 9, 3, 4)):
        lines = [b"%02d\n" % number for number in itertools.islice(numbers, count)]
        (folder / f"part-{at}").write_bytes(b"".join(lines))
    return str(folder / "part-*")


def number(record):
    return int(record)


def noisy(record):
    return torch.tensor([int(record), torch.rand(()).item()], dtype=torch.float64)


def make(paths, *, batch=2, cls=DataLoader, workers=None, transform=number, rank=0, world_size=1, **options):
    stream = FileStream(
        paths, global_batch=4, seed=2, transform=transform, rank=rank, world_size=world_size, **options
    )
    return cls(stream, batch_size=batch, **(workers or {}))


def taken_of(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def stored(saved):
    return context.decode(context.loads(context.dumps(context.encode(saved, path="data/"))))


def train(loader, part, *, start, stop, size=4, on_saved=None):
    """Run a loop over epochs that takes `size` records of this rank per step; return what each step consumed."""
    step, held, consumed = start, [], []
    while step < stop:
        for batch in loader:
            found = taken_of(batch)
            held += found if isinstance(found, list) else [found]
            # The last batch of an epoch may be short.
            if len(held) < size and not _is_last(loader, part):
                continue
            step += 1
            consumed.append(held)
            held = []
            part.on_step(step)
            if on_saved is not None:
                on_saved(step, stored(part.capture(step)))
            if step == stop:
                break
    return consumed


def _is_last(loader, part):
    return part._takeover.current.is_finished()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("order", ORDERS)
def test_resuming_at_any_step_sees_what_a_straight_run_sees(paths, order, workers):
    options = ORDERS[order]
    saves = {}
    loader = make(paths, **options)
    expected = train(loader, attach_data(loader, seed=4), start=0, stop=13, on_saved=saves.__setitem__)
    alone = FileStream(paths, global_batch=4, seed=2, transform=number, **options)
    epochs = [record for _ in range(3) for record in alone]
    assert [record for step in expected for record in step] == epochs[: sum(map(len, expected))]
    # With workers, the middle and both sides of an epoch's end will do.
    for step in range(1, 13) if workers == "0 workers" else (2, 4, 5, 6):
        fresh = make(paths, workers=WORKERS[workers], **options)
        part = attach_data(fresh, seed=4)
        part.restore(saves[step])
        assert stored(part.capture(step)) == saves[step]
        assert train(fresh, part, start=step, stop=13) == expected[step:], f"saved at step {step}"


@pytest.mark.parametrize("cls", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("batch", [None, 1, 2, 4])
@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
def test_loaders_of_any_batch_size_and_class_see_the_same(paths, batch, workers, cls):
    loader = make(paths)
    expected = train(loader, attach_data(loader, seed=4), start=0, stop=7)
    other = make(paths, batch=batch, cls=cls, workers=WORKERS[workers])
    assert train(other, attach_data(other, seed=4), start=0, stop=7) == expected


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_and_workers_may_change_between_save_and_load(paths, order, after):
    def run(start, stop, size, saved, workers):
        by_rank, captured = [], []
        for rank in range(size):
            loader = make(paths, batch=1, rank=rank, world_size=size, workers=workers, **ORDERS[order])
            part = attach_data(loader, seed=0)
            assert not part.per_rank
            if saved is not None:
                part.restore(saved)
            by_rank.append(train(loader, part, start=start, stop=stop, size=4 // size))
            captured.append(stored(part.capture(stop)))
        assert all(item == captured[0] for item in captured)
        return [list(itertools.chain(*step)) for step in zip(*by_rank, strict=True)], captured[0]

    # Short batches leave some ranks without a record, and this loop then steps with the next epoch's.
    stop = 5 if order == "with the last" else 9
    expected, _ = run(0, stop, 1, None, None)
    first, saved = run(0, 3, 2, None, None)
    second, _ = run(3, stop, after, saved, {"num_workers": after % 3})
    assert first + second == expected


@pytest.mark.parametrize("workers", WORKERS)
def test_global_generators_are_left_alone_and_noise_is_that_of_the_straight_run(paths, workers):
    loader = make(paths, transform=noisy)
    expected = train(loader, attach_data(loader, seed=4), start=0, stop=7)
    before = context.encode(rng.capture_rng())
    other = make(paths, transform=noisy, workers=WORKERS[workers])
    assert train(other, attach_data(other, seed=4), start=0, stop=7) == expected
    assert context.encode(rng.capture_rng()) == before


@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
def test_a_state_at_the_last_batch_starts_the_next_epoch(paths, workers):
    loader = make(paths, batch=4, workers=WORKERS[workers])
    part = attach_data(loader, seed=4)
    for step, _ in enumerate(loader, 1):
        part.on_step(step)
        saved = stored(part.capture(step))
    assert (step, saved["epoch"], saved["step_in_epoch"], saved["file"]) == (5, 1, 0, "part-0")
    assert stored(part.capture(5)) == saved
    fresh = make(paths, batch=4, workers=WORKERS[workers])
    resumed = attach_data(fresh, seed=4)
    resumed.restore(saved)
    assert [taken_of(batch) for batch in fresh] == [taken_of(batch) for batch in loader]


def test_prefetching_workers_do_not_move_the_position(paths):
    loader = make(paths, workers={"num_workers": 2, "prefetch_factor": 4})
    part = attach_data(loader, seed=4)
    iterator = iter(loader)
    next(iterator), next(iterator)
    part.on_step(1)
    position = part.capture(1)
    assert [position[name] for name in ("file", "record", "byte")] == ["part-0", 4, 12]


def test_a_thread_that_fetches_far_ahead_does_not_move_the_position(paths):
    saves = {}
    straight = make(paths, shuffle_window=3)
    train(straight, attach_data(straight, seed=4), start=0, stop=9, on_saved=saves.__setitem__)
    loader = make(paths, shuffle_window=3)
    part = attach_data(loader, seed=4)
    thread = threading.Thread(target=lambda: [list(loader) for _ in range(2)])
    thread.start()
    thread.join()
    for step in range(1, 10):
        part.on_step(step)
        position = stored(part.capture(step))
        position["basis"]["records_per_epoch"] = saves[step]["basis"]["records_per_epoch"]
        assert position == saves[step]


def test_a_stream_without_a_loader_counts_steps(paths):
    def run(stream, part, start, stop, saves):
        taken = []
        while start < stop:
            iterator = iter(stream)
            while start < stop and (step := list(itertools.islice(iterator, 4))):
                taken.append(step)
                start += 1
                part.on_step(start)
                saves[start] = stored(part.capture(start))
        return taken

    def fresh():
        return FileStream(paths, global_batch=4, transform=number)

    saves = {}
    stream = fresh()
    expected = run(stream, attach_data(stream, seed=0), 0, 12, saves)
    for step in range(1, 12):
        stream = fresh()
        part = attach_data(stream, seed=0)
        part.restore(saves[step])
        assert run(stream, part, step, 12, {}) == expected[step:]
    with pytest.raises(ConfigError, match=r"before restore\(\)"):
        part.restore(saves[1])


@pytest.mark.parametrize("global_batch", [2, 8])
def test_a_global_batch_that_contradicts_consumption_is_refused(tmp_path, global_batch):
    (tmp_path / "a").write_bytes(b"1\n" * 200)
    loader = DataLoader(FileStream(tmp_path / "a", global_batch=global_batch), batch_size=2)
    part = attach_data(loader, seed=0)
    with pytest.raises(ConfigError, match="global_batch = batch size x accumulation x ranks"):
        train(loader, part, start=0, stop=40)


def test_a_loader_batch_that_does_not_divide_the_global_batch_is_refused(paths):
    loader = make(paths, batch=3)
    part = attach_data(loader, seed=0)
    with pytest.raises(ConfigError, match="batch_size=3 does not divide"):
        iter(loader)
    assert part.iterators_made == 0


def test_an_iterator_made_before_restore_and_positions_of_other_kinds_are_refused(paths):
    loader = make(paths)
    part = attach_data(loader, seed=0)
    saved = stored(part.capture(0))
    with pytest.raises(StateMismatchError, match="saved from 'elastic' data, this run's is 'stream'"):
        part.restore({**saved, "kind": "elastic"})
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ConfigError, match=r"make the iterator after restore\(\)"):
        part.restore(saved)


def test_a_part_names_its_settings_and_describes_its_position(paths):
    loader = make(paths, shuffle_window=3)
    part = attach_data(loader, seed=0)
    train(loader, part, start=0, stop=2)
    assert part.kind == "stream"
    assert set(part.settings()) == {
        "files",
        "records",
        "global_batch",
        "seed",
        "shuffle_files",
        "shuffle_window",
        "drop_last",
    }
    assert part.describe(part.capture(2)) == (
        "epoch 0, 8 samples into it, 8 consumed in all; file part-2, record 0 (byte 0),"
        " 2 records into the shuffle window there"
    )


def test_the_length_of_a_loader_is_known_after_an_epoch(paths):
    loader = make(paths)
    part = attach_data(loader, seed=0)
    with pytest.raises(TypeError):
        len(loader)
    list(loader)
    assert len(loader) == 10
    assert part.iterators_made == 1
    assert len(make(paths, records=3).dataset.sampler) == 20


def test_a_loader_whose_part_is_gone_works_as_before(paths):
    loader = make(paths)
    untouched = dict(vars(loader))
    part = attach_data(loader, seed=4)
    first = [taken_of(batch) for batch in loader]
    del part
    assert [taken_of(batch) for batch in loader] == first
    assert vars(loader) == untouched


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 3}], ids=str)
def test_without_a_train_state_a_loader_of_known_batch_size_sees_the_same(paths, workers):
    expected = [taken_of(batch) for batch in make(paths)]
    loader = make(paths, workers=workers, batch_size=2)
    assert [taken_of(batch) for batch in loader] == expected
    loader.dataset.set_epoch(1)
    assert len([taken_of(batch) for batch in loader]) == len(expected)


def test_without_a_train_state_several_workers_need_the_batch_size(paths):
    with pytest.raises(ConfigError, match="hand the loader over as data= of a TrainState"):
        list(make(paths, workers={"num_workers": 2}))


@pytest.mark.slow
def test_spawned_workers_see_the_same(paths):
    expected = train(loader := make(paths), attach_data(loader, seed=4), start=0, stop=7)
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"}
    spawned = make(paths, workers=workers)
    assert train(spawned, attach_data(spawned, seed=4), start=0, stop=7) == expected


def test_errors_in_workers_name_the_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1\n" * 8)
    loader = DataLoader(FileStream(path, records=2, global_batch=2), batch_size=2, num_workers=1)
    part = attach_data(loader, seed=0)
    path.unlink()
    with pytest.raises(StorageUnavailableError, match=f"cannot read {path}"):
        list(loader)
    assert part.iterators_made == 1


def test_other_iterables_are_pointed_to_the_stream():
    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.count()

    with pytest.raises(ConfigError, match=r"use relight\.FileStream"):
        attach_data(DataLoader(Endless()), seed=0)
