"""Random streams come back exactly, and neither capture nor restore draws."""

# ruff: noqa: NPY002 (the legacy global stream is under test)

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

from relight.checkpoint import context, rng
from relight.errors import StateMismatchError


def stored(saved):
    return context.decode(context.loads(context.dumps(context.encode(saved))))


def draw_all():
    return (
        [random.random(), random.gauss(0, 1), random.getrandbits(70)],
        [np.random.rand(), np.random.standard_normal(), np.random.randint(0, 2**31)],
        [*torch.rand(3).tolist(), *torch.randn(17).tolist(), torch.randint(0, 2**31, ()).item()],
    )


@pytest.fixture(autouse=True)
def seeded():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 3])
def test_every_global_stream_continues_where_it_was(drawn_before):
    for _ in range(drawn_before):
        draw_all()
    saved = stored(rng.capture_rng())
    expected = [draw_all() for _ in range(3)]
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    rng.restore_rng(saved)
    assert [draw_all() for _ in range(3)] == expected


def test_capture_and_restore_do_not_draw():
    before = draw_all, rng.capture_rng()
    rng.restore_rng(stored(rng.capture_rng()))
    after = rng.capture_rng()
    assert context.encode(after) == context.encode(before[1])


def test_a16_restore_works_while_torch_load_is_weights_only(monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr(torch, "load", None)
    saved = stored(rng.capture_rng())
    expected = draw_all()
    rng.restore_rng(saved)
    assert draw_all() == expected


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_a16_a_missing_stream_is_an_error_that_names_it(kind):
    saved = rng.capture_rng()
    del saved[kind]
    with pytest.raises(StateMismatchError, match=kind):
        rng.restore_rng(saved)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("python", None),
        ("python", {"version": 3, "words": b"abcd", "gauss": None}),
        ("python", {"version": 3, "words": b"\xff" * 2500, "gauss": None}),
        ("python", {"version": 3, "words": b"\0" * 2500, "gauss": "x"}),
        ("numpy", {"bit_generator": "PCG64", "state": {}}),
        ("numpy", {"bit_generator": "MT19937", "state": {"key": np.zeros(624, np.uint32), "pos": 10**6}}),
        ("numpy", 5),
        ("torch", b""),
        ("torch", b"123"),
        ("torch", "text"),
        ("torch", b"\xff" * 5056),
    ],
)
def test_bad_content_is_an_error_that_names_the_stream(kind, bad):
    saved = rng.capture_rng() | {kind: bad}
    with pytest.raises(StateMismatchError, match=f"'{kind}'"):
        rng.restore_rng(saved)


def test_an_unknown_stream_is_refused():
    with pytest.raises(StateMismatchError, match="tpu"):
        rng.restore_rng(rng.capture_rng() | {"tpu": []})


def test_a_saved_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(StateMismatchError, match="saved for 2 devices, this process sees 1"):
        rng.restore_rng(rng.capture_rng() | {"cuda": [b"0" * 16, b"1" * 16]})


def test_every_cuda_device_in_use_is_captured_and_restored(monkeypatch):
    states = [torch.arange(16, dtype=torch.uint8), torch.arange(16, 32, dtype=torch.uint8)]
    restored = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state}))
    saved = stored(rng.capture_rng())
    rng.restore_rng(saved)
    assert [restored[index].tolist() for index in (0, 1)] == [state.tolist() for state in states]


def test_an_unused_cuda_device_is_not_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert "cuda" not in rng.capture_rng()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_cuda_stream_continues():
    torch.rand(3, device="cuda")
    saved = stored(rng.capture_rng())
    expected = [torch.rand(5, device="cuda").tolist() for _ in range(2)]
    rng.restore_rng(saved)
    assert [torch.rand(5, device="cuda").tolist() for _ in range(2)] == expected


def numpy_generator(name):
    return lambda seed: np.random.Generator(getattr(np.random, name)(seed))


GENERATORS = {
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.randn(9, generator=g).tolist(),
    ),
    "RandomState": (np.random.RandomState, lambda g: [g.rand(), g.standard_normal()]),
    **{
        name: (numpy_generator(name), lambda g: [g.random(), g.integers(0, 9, dtype=np.uint32), g.normal()])
        for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
    "bits": (np.random.PCG64, lambda g: g.random_raw(3).tolist()),
}


@pytest.mark.parametrize("drawn_before", [0, 1, 3])
@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_object_continues_where_it_was(name, drawn_before):
    make, draw = GENERATORS[name]
    original, fresh = make(5), make(6)
    for _ in range(drawn_before):
        draw(original)
    assert rng.is_generator(original)
    saved = stored(rng.capture_generator(original))
    rng.restore_generator(fresh, saved)
    assert [draw(fresh) for _ in range(4)] == [draw(original) for _ in range(4)]


@pytest.mark.parametrize("other", [name for name in GENERATORS if name != "Philox"])
def test_a_state_of_another_kind_is_refused(other):
    with pytest.raises(StateMismatchError, match="saved is"):
        rng.restore_generator(GENERATORS["Philox"][0](1), rng.capture_generator(GENERATORS[other][0](1)))


@pytest.mark.parametrize("name", GENERATORS)
def test_a_malformed_state_is_refused(name):
    generator = GENERATORS[name][0](1)
    saved = rng.capture_generator(generator)
    with pytest.raises(StateMismatchError):
        rng.restore_generator(generator, {**saved, "state": {}})


def test_spawned_children_continue():
    original = np.random.default_rng(1)
    original.spawn(2)
    fresh = np.random.default_rng(1)
    rng.restore_generator(fresh, stored(rng.capture_generator(original)))
    assert fresh.spawn(1)[0].random() == original.spawn(1)[0].random()
    with pytest.raises(StateMismatchError, match="spawned"):
        rng.restore_generator(np.random.default_rng(2), rng.capture_generator(original))
    with pytest.raises(StateMismatchError, match="spawned"):
        rng.restore_generator(original, rng.capture_generator(np.random.default_rng(1)))


@pytest.mark.parametrize("value", [random.SystemRandom(), type("Mine", (random.Random,), {})(), 5, random])
def test_other_objects_are_no_generators(value):
    assert not rng.is_generator(value)
    with pytest.raises(StateMismatchError, match="no random generator"):
        rng.capture_generator(value)


def test_a_private_stream_leaves_the_global_ones_untouched():
    before = context.encode(rng.capture_rng())
    with rng.RngStream(5):
        first = draw_all()
    assert context.encode(rng.capture_rng()) == before
    with contextlib.suppress(KeyError), rng.RngStream(5):
        assert draw_all() == first
        raise KeyError
    assert context.encode(rng.capture_rng()) == before


def test_a_kept_stream_continues_from_block_to_block():
    with rng.RngStream(5):
        expected = [draw_all(), draw_all()]
    stream = rng.RngStream(5, keep=True)
    parts = []
    for _ in range(2):
        with stream:
            parts.append(draw_all())
    assert parts == expected


def test_derived_seeds_differ_by_every_word():
    seeds = {rng.derive_seed(a, b, c) for a in range(20) for b in range(20) for c in ("x", "y")}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
