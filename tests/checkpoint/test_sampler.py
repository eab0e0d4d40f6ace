"""The elastic order: a permutation per epoch, the same on any number of ranks, resumable anywhere in O(1)."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from relight.checkpoint.order import SampleOrder
from relight.checkpoint.sampler import ElasticSampler
from relight.errors import ConfigError, StateMismatchError


def order_of(num_samples, *, seed=0, epoch=0):
    return SampleOrder(num_samples, seed=seed, epoch=epoch).ids_at(np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 64, 4095, 4096, 4097, 5000, 65536, 65537, 100_003])
def test_the_order_is_a_permutation(num_samples):
    assert sorted(order_of(num_samples)) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [5, 4096, 50_000, 2**40, 2**53 + 1])
def test_single_positions_agree_with_ranges_of_positions(num_samples):
    order = SampleOrder(num_samples, seed=3, epoch=1)
    positions = np.random.default_rng(0).integers(0, num_samples, 200)
    ids = order.ids_at(positions)
    assert ids == [order.ids_at(np.array([position]))[0] for position in positions]
    assert all(0 <= sample < num_samples for sample in ids)


def test_the_order_is_frozen():
    """A checkpoint's meaning hangs on these numbers; they must be the same in every version and on every machine."""
    assert order_of(10, seed=7, epoch=2) == FROZEN_SMALL
    assert SampleOrder(10**12, seed=7, epoch=2).ids_at(np.arange(4)) == FROZEN_LARGE


FROZEN_SMALL = [2, 9, 3, 4, 0, 8, 5, 6, 1, 7]
FROZEN_LARGE = [10702334414, 479220007099, 265697080739, 420422815690]


def test_orders_of_other_seeds_and_epochs_differ():
    for num_samples in (64, 5000):
        orders = {
            tuple(order_of(num_samples, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)
        }
        assert len(orders) == 25


def chi_square_excess(counts):
    """Standard deviations by which the chi-square statistic of equally likely counts exceeds its mean."""
    expected = counts.mean()
    degrees = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_every_permutation_of_few_samples_is_equally_likely(num_samples):
    number = {p: i for i, p in enumerate(itertools.permutations(range(num_samples)))}
    counts = np.zeros(len(number))
    for epoch in range(100 * len(number)):
        counts[number[tuple(order_of(num_samples, epoch=epoch))]] += 1
    assert abs(chi_square_excess(counts)) < 5


@pytest.mark.parametrize("num_samples", [17, 4096, 4097, 6000, 2**20 + 7])
def test_every_sample_is_equally_likely_at_every_position(num_samples):
    """Checked on the first, a middle and the last positions, in 16 bins of ids, over many epochs."""
    bins = min(16, num_samples)
    positions = np.array([0, 1, num_samples // 2, num_samples - 1])
    counts = np.zeros((len(positions), bins))
    for epoch in range(3000):
        for row, sample in enumerate(SampleOrder(num_samples, seed=11, epoch=epoch).ids_at(positions)):
            counts[row, sample * bins // num_samples] += 1
    weights = np.bincount(np.arange(num_samples) * bins // num_samples, minlength=bins)
    scaled = counts / weights * weights.mean()
    assert max(chi_square_excess(row) for row in scaled) < 5


@pytest.mark.parametrize("num_samples", [4096, 4097, 30_011])
def test_neighbours_are_unrelated(num_samples):
    ids = np.array(order_of(num_samples))
    steps = np.diff(ids) % num_samples
    counts = np.bincount(steps * 32 // num_samples, minlength=32)
    assert abs(chi_square_excess(counts)) < 5
    correlation = np.corrcoef(ids[:-1], ids[1:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(num_samples)
    assert abs((ids == np.arange(num_samples)).sum() - 1) < 6
    inversions = (ids[: num_samples // 2] > ids[num_samples // 2 : 2 * (num_samples // 2)]).mean()
    assert abs(inversions - 0.5) < 5 / math.sqrt(num_samples)


def test_epochs_are_unrelated():
    first, second = (np.array(order_of(20_000, epoch=epoch)) for epoch in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert (first == second).sum() < 10


def ranks(world_size, **options):
    return [ElasticSampler(rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def global_batches(samplers, global_batch, steps):
    """Consume `steps` global batches from fresh iterators; return them as one list of ids per step."""
    iterators = [iter(sampler) for sampler in samplers]
    batches = []
    for _ in range(steps):
        batch = []
        for sampler, iterator in zip(samplers, iterators, strict=True):
            start, stop = sampler._part(0, sampler.rank, sampler.world_size)
            batch += itertools.islice(iterator, stop - start)
        batches.append(batch)
    return batches


def straight(num_epochs, **options):
    """The global batches of a one-rank run."""
    sampler = ElasticSampler(rank=0, world_size=1, **options)
    batches = []
    for _ in range(num_epochs):
        ids = list(sampler)
        size = options["global_batch"]
        batches += [ids[start : start + size] for start in range(0, len(ids), size)]
    return batches


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_any_number_of_ranks_sees_the_same_global_batches(world_size, shuffle):
    options = {"num_samples": 100, "global_batch": 8, "seed": 5, "shuffle": shuffle}
    assert global_batches(ranks(world_size, **options), 8, 12) == straight(1, **options)
    assert all(len(sampler) == 96 // world_size for sampler in ranks(world_size, **options))


def test_the_global_order_is_the_keyed_permutation():
    assert flat(straight(1, num_samples=96, global_batch=8, seed=5)) == order_of(96, seed=5)
    assert flat(straight(1, num_samples=20, global_batch=8, shuffle=False)) == list(range(16))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_short_last_batch_is_split_near_evenly(world_size):
    options = {"num_samples": 21, "global_batch": 8, "drop_last": False}
    samplers = ranks(world_size, **options)
    ids = [list(sampler) for sampler in samplers]
    assert [len(part) for part in ids] == [len(sampler) for sampler in samplers]
    assert sorted(itertools.chain(*ids)) == list(range(21))
    sizes = [len(part) for part in ids]
    assert max(sizes) - min(sizes) <= 1
    assert samplers[0].steps_per_epoch == 3
    assert [sampler.samples_of_rank(1, 5) for sampler in samplers] == [
        8 // world_size * 3 + len(part) - 16 // world_size for part in ids
    ]


@given(st.data())
def test_a_run_with_changing_ranks_misses_and_repeats_nothing(data):
    global_batch = data.draw(st.sampled_from([4, 8, 12]))
    num_samples = data.draw(st.integers(global_batch, 60))
    options = {"num_samples": num_samples, "global_batch": global_batch, "seed": data.draw(st.integers(0, 9))}
    expected = straight(3, **options)
    saved, done, actual = None, 0, []
    while done < len(expected):
        world_size = data.draw(st.sampled_from([size for size in (1, 2, 3, 4) if global_batch % size == 0]))
        samplers = ranks(world_size, **options)
        if saved is not None:
            for sampler in samplers:
                sampler.load(saved)
        left_in_epoch = samplers[0].steps_per_epoch - samplers[0].step_in_epoch
        steps = data.draw(st.integers(1, left_in_epoch))
        actual += global_batches(samplers, global_batch, steps)
        done += steps
        states = [sampler.state_at(done) for sampler in samplers]
        assert all(state == states[0] for state in states)
        saved = states[0]
    assert actual == expected
    assert saved["consumed_samples"] == done * global_batch


def test_iterators_go_on_from_what_was_consumed():
    sampler = ElasticSampler(40, global_batch=4)
    expected = order_of(40)
    assert list(itertools.islice(sampler, 12)) == expected[:12]
    sampler.advance_to(2)
    assert list(itertools.islice(sampler, 4)) == expected[8:12]
    assert (sampler.epoch, sampler.step_in_epoch) == (0, 2)


def test_an_exhausted_iterator_starts_the_next_epoch():
    sampler = ElasticSampler(40, global_batch=4)
    assert [list(sampler), list(sampler)] == [order_of(40), order_of(40, epoch=1)]
    assert sampler.epoch == 2


def test_h_a10_the_end_of_an_epoch_is_the_start_of_the_next():
    sampler = ElasticSampler(40, global_batch=4)
    sampler.advance_to(10)
    state = sampler.state_at(10)
    assert (state["epoch"], state["step_in_epoch"]) == (1, 0)
    fresh = ElasticSampler(40, global_batch=4)
    fresh.load(state)
    assert list(fresh) == order_of(40, epoch=1)
    assert fresh.state_at(10) == state


def test_a_changed_global_batch_converts_by_samples():
    sampler = ElasticSampler(48, global_batch=4)
    fresh = ElasticSampler(48, global_batch=12)
    fresh.load(sampler.state_at(15))
    assert (fresh.epoch, fresh.step_in_epoch) == (1, 1)
    assert list(fresh) == order_of(48, epoch=1)[12:]
    fresh.load(sampler.state_at(15))
    assert fresh.state_at(18) == {
        "step": 18,
        "epoch": 2,
        "step_in_epoch": 0,
        "samples_in_epoch": 0,
        "consumed_samples": 96,
        "global_batch": 12,
    }
    with pytest.raises(ConfigError, match="no multiple of the new global_batch=12"):
        fresh.load(sampler.state_at(13))


def test_a_run_may_start_at_any_step():
    sampler = ElasticSampler(40, global_batch=4)
    sampler.rebase(1000)
    sampler.advance_to(1003)
    assert (sampler.epoch, sampler.step_in_epoch) == (0, 3)
    fresh = ElasticSampler(40, global_batch=4)
    fresh.load(sampler.state_at(1003))
    assert list(fresh) == order_of(40)[12:]
    with pytest.raises(ConfigError, match="before its base step"):
        sampler.advance_to(999)


def test_set_epoch_is_a_no_op_in_the_current_epoch_and_refused_in_another():
    sampler = ElasticSampler(40, global_batch=4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(sampler) == order_of(40, epoch=epoch)
    with pytest.raises(ConfigError, match="in epoch 3"):
        sampler.set_epoch(0)
    fresh = ElasticSampler(40, global_batch=4)
    fresh.set_epoch(5)
    assert list(fresh) == order_of(40, epoch=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "global_batch": 1}, "num_samples"),
        ({"num_samples": 4, "global_batch": 0}, "global_batch"),
        ({"num_samples": 4, "global_batch": 2.0}, "global_batch"),
        ({"num_samples": 4, "global_batch": True}, "global_batch"),
        ({"num_samples": 4, "global_batch": 8}, "leaves nothing"),
        ({"num_samples": 9, "global_batch": 9, "rank": 0, "world_size": 2}, "cannot be divided"),
        ({"num_samples": 9, "global_batch": 9, "rank": 3, "world_size": 3}, "not in range"),
        ({"num_samples": 9, "global_batch": 9, "rank": 0}, "both rank and world_size"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ElasticSampler(**arguments)


@pytest.mark.parametrize(
    "saved", [{}, {"epoch": 1}, {**ElasticSampler(4, global_batch=2).state_at(1), "epoch": -1}]
)
def test_a_foreign_position_is_refused(saved):
    with pytest.raises(StateMismatchError, match="not one of an ElasticSampler"):
        ElasticSampler(4, global_batch=2).load(saved)


def test_ranks_are_those_of_torch_distributed_at_first_use(monkeypatch):
    sampler = ElasticSampler(9, global_batch=9)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    assert (sampler.rank, sampler.world_size) == (2, 3)
    assert list(sampler) == order_of(9)[6:]


def test_settings_are_those_that_shape_the_trajectory():
    sampler = ElasticSampler(9, global_batch=3, seed=4, rank=1, world_size=3, shuffle=False, drop_last=False)
    assert sampler.settings() == {
        "num_samples": 9,
        "global_batch": 3,
        "seed": 4,
        "shuffle": False,
        "drop_last": False,
    }


def test_memory_and_resuming_do_not_grow_with_the_dataset():
    sampler = ElasticSampler(10**12, global_batch=1024)
    sampler.advance_to(10**8)
    tracemalloc.start()
    ids = list(itertools.islice(sampler, 10_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(ids)) == 10_000
    assert peak < 3_000_000
