"""Random generators: capture and restore every stream that training draws from, exactly and without drawing.

The global streams (Python, NumPy's legacy one, torch's CPU and device ones) belong to a global rank. Generators that
a user or a sampler owns are captured one by one. States are plain values for `context`; no pickle is involved.
"""

# ruff: noqa: NPY002 (NumPy's legacy global stream is what this module keeps)

from __future__ import annotations

import array
import random
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import xxhash

from relight.errors import StateMismatchError

__all__ = [
    "RngStream",
    "capture_generator",
    "capture_rng",
    "derive_rng",
    "derive_seed",
    "is_generator",
    "restore_generator",
    "restore_rng",
]

_DEVICE_KINDS = ("cuda", "xpu", "mps")
_FOREIGN_ERRORS = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def capture_rng() -> dict[str, Any]:
    """Return the state of every global random stream of this process; draws nothing and changes nothing.

    Returns:
        ``{"python": ..., "numpy": ..., "torch": ...}`` and an entry per kind of device that this process uses
        (``"cuda"``, ``"xpu"``, ``"mps"``): one state for each device in index order.
    """
    saved: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": _to_bytes(torch.default_generator.get_state()),
    }
    for kind in _DEVICE_KINDS:
        if _is_in_use(kind):
            saved[kind] = [_to_bytes(state) for state in _device_states(kind)]
    return saved


def restore_rng(saved: Mapping[str, Any]) -> None:
    """Put back what `capture_rng` returned; the next draw of every stream is the one that followed the capture.

    Raises:
        StateMismatchError: a stream is missing, unknown, of another kind or malformed, or a saved device is not
            there. Streams named before it in the message's order may have been set already; do not train on.
    """
    setters: dict[str, Callable[[Any], None]] = {
        "python": lambda state: random.setstate(_python_tuple(state)),
        "numpy": lambda state: np.random.set_state(_checked_numpy(state)),
        "torch": lambda state: _set_torch(torch.default_generator, state),
    }
    missing = sorted(set(setters) - set(saved))
    unknown = sorted(set(saved) - set(setters) - set(_DEVICE_KINDS))
    if missing or unknown:
        raise StateMismatchError(f"random state: missing {missing}, unknown {unknown}", path="rng")
    for kind in _DEVICE_KINDS:
        if kind in saved:
            _check_devices(kind, saved[kind])
            setters[kind] = _device_setter(kind)
    for name, setter in setters.items():
        _apply(name, setter, saved[name])


def derive_rng(saved: Mapping[str, Any], rank: int) -> None:
    """Seed every global stream of a rank that did not exist when `saved` was captured on rank 0.

    The seed of each stream is a function of rank 0's saved state of it and of `rank` alone, so that restoring twice
    gives the same draws, and no two ranks the same ones.
    """
    digest = xxhash.xxh3_64_hexdigest(repr(sorted(saved.items())).encode())
    random.seed(derive_seed("rng", "python", digest, rank))
    np.random.seed(derive_seed("rng", "numpy", digest, rank) % 2**32)
    # Seeds the generators of all devices too.
    torch.manual_seed(derive_seed("rng", "torch", digest, rank))


def is_generator(obj: object) -> bool:
    """Return whether `capture_generator` takes `obj`; a subclass of random.Random may hold more and does not count."""
    return type(obj) is random.Random or isinstance(
        obj, torch.Generator | np.random.Generator | np.random.RandomState | np.random.BitGenerator
    )


def capture_generator(obj: Any) -> dict[str, Any]:
    """Return the state of one generator object; draws nothing.

    Raises:
        StateMismatchError: `obj` is no generator of Python, NumPy or torch.
    """
    match obj:
        case torch.Generator():
            return {"kind": "torch.Generator", "device": obj.device.type, "state": _to_bytes(obj.get_state())}
        case np.random.RandomState():
            return {"kind": "numpy.random.RandomState", "state": obj.get_state(legacy=False)}
        case np.random.Generator():
            return {"kind": "numpy.random.Generator", **_bit_generator_state(obj.bit_generator)}
        case np.random.BitGenerator():
            return {"kind": "numpy.random.BitGenerator", **_bit_generator_state(obj)}
        case random.Random() if type(obj) is random.Random:
            return {"kind": "random.Random", "state": _python_state(obj.getstate())}
    raise StateMismatchError(f"{type(obj).__qualname__} is no random generator that relight knows")


def restore_generator(obj: Any, saved: Mapping[str, Any]) -> None:
    """Put the state that `capture_generator` returned into `obj`, in place.

    Raises:
        StateMismatchError: `saved` is of another kind of generator, bit generator or device, or malformed; or it
            had spawned children and `obj` was seeded otherwise, so that the next child could not be the same.
    """
    current = capture_generator(obj)
    sides = [{key: side.get(key) for key in ("kind", "device", "bit_generator")} for side in (saved, current)]
    if sides[0] != sides[1]:
        raise StateMismatchError(f"generator: saved is {_spell(sides[0])}, live is {_spell(sides[1])}")
    setters: dict[str, Callable[[Any], None]] = {
        "torch.Generator": lambda state: _set_torch(obj, state),
        "numpy.random.RandomState": lambda state: obj.set_state(_checked_numpy(state)),
        "numpy.random.Generator": lambda state: setattr(obj.bit_generator, "state", _checked_numpy(state)),
        "numpy.random.BitGenerator": lambda state: setattr(obj, "state", _checked_numpy(state)),
        "random.Random": lambda state: obj.setstate(_python_tuple(state)),
    }
    kind = current["kind"]
    _apply(kind, setters[kind], saved.get("state"))
    if "spawned" in saved or "spawned" in current:
        _restore_spawned(obj.bit_generator if kind == "numpy.random.Generator" else obj, saved, current)


def derive_seed(*words: object) -> int:
    """Return a 63-bit seed that is a function of `words` alone; near-by words give unrelated seeds."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, words)).encode()) >> 1


class RngStream:
    """A private stream behind Python's, NumPy's and torch's global CPU generators while the block runs.

    On leaving, also by an exception, the three generators continue as if the block had drawn nothing. With `keep`,
    the next `with` on the same object continues the private stream; without it each block starts from the seed.
    """

    def __init__(self, seed: int, *, keep: bool = False) -> None:
        self._seed = seed
        self._keep = keep
        self._own: tuple[Any, Any, torch.Tensor] | None = None
        self._outer: tuple[Any, Any, torch.Tensor] | None = None

    def __enter__(self) -> Self:
        self._outer = _global_states()
        if self._own is not None:
            _set_global_states(self._own)
        else:
            self.reseed(self._seed)
        return self

    def reseed(self, seed: int) -> None:
        """Start the private stream of `seed`; only inside the block."""
        random.seed(derive_seed(seed, "python"))
        word = derive_seed(seed, "numpy")
        np.random.seed([word & 0xFFFFFFFF, word >> 32])
        # Not torch.manual_seed: that would seed the devices too.
        torch.default_generator.manual_seed(derive_seed(seed, "torch"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keep:
            self._own = _global_states()
        assert self._outer is not None
        _set_global_states(self._outer)
        self._outer = None


def _global_states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _set_global_states(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def _apply(name: str, setter: Callable[[Any], None], state: Any) -> None:
    try:
        setter(state)
    except _FOREIGN_ERRORS as error:
        raise StateMismatchError(
            f"random state {name!r} cannot be restored: {error}", path=f"rng/{name}"
        ) from error


def _spell(side: Mapping[str, Any]) -> str:
    return " ".join(str(value) for value in side.values() if value is not None)


def _python_state(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    packed = array.array("I", words)
    if sys.byteorder == "big":
        packed.byteswap()
    return {"version": version, "words": packed.tobytes(), "gauss": gauss}


def _python_tuple(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    packed = array.array("I", saved["words"])
    if sys.byteorder == "big":
        packed.byteswap()
    if type(saved["version"]) is not int or not isinstance(saved["gauss"], float | None):
        raise ValueError("malformed")
    return saved["version"], tuple(packed), saved["gauss"]


def _checked_numpy(state: Any) -> Any:
    """Check the cursors that NumPy takes unchecked and then indexes memory with."""
    inner = state["state"]
    if isinstance(inner, Mapping) and state["bit_generator"] == "MT19937":
        if not 0 <= inner["pos"] <= 624 or len(inner["key"]) != 624:
            raise ValueError("malformed MT19937 state")
    elif state["bit_generator"] == "Philox" and not 0 <= state["buffer_pos"] <= 4:
        raise ValueError("malformed Philox state")
    return state


def _bit_generator_state(generator: Any) -> dict[str, Any]:
    saved: dict[str, Any] = {"bit_generator": type(generator).__name__, "state": generator.state}
    seeds = getattr(generator, "seed_seq", None)
    spawned = getattr(seeds, "n_children_spawned", 0)
    if seeds is not None and spawned:
        saved["spawned"] = {"entropy": seeds.entropy, "spawn_key": tuple(seeds.spawn_key), "count": spawned}
    return saved


def _restore_spawned(generator: Any, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Bring the count of spawned children to the saved one, so that the next child is the same."""
    seeds: Any = generator.seed_seq
    wanted = saved.get("spawned", {"entropy": seeds.entropy, "spawn_key": tuple(seeds.spawn_key), "count": 0})
    is_same_root = wanted["entropy"] == seeds.entropy and tuple(wanted["spawn_key"]) == tuple(seeds.spawn_key)
    missing = wanted["count"] - seeds.n_children_spawned
    if not is_same_root or missing < 0:
        raise StateMismatchError(
            f"generator had spawned {wanted['count']} children of another seed or fewer than"
            f" {current.get('spawned', {}).get('count', 0)}; seed the live one as the saved one was"
        )
    if missing:
        seeds.spawn(missing)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _to_tensor(state: Any) -> torch.Tensor:
    if type(state) is not bytes or not state:
        raise TypeError("state is not a byte string")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _set_torch(generator: torch.Generator, state: Any) -> None:
    generator.set_state(_to_tensor(state))


def _is_in_use(kind: str) -> bool:
    """Return whether this process has used devices of this kind; asking must not initialise them."""
    if kind == "mps":
        return torch.backends.mps.is_available()
    module = torch.cuda if kind == "cuda" else torch.xpu
    return bool(module.is_available() and module.is_initialized())


def _device_states(kind: str) -> list[torch.Tensor]:
    if kind == "mps":
        return [torch.mps.get_rng_state()]
    states: list[torch.Tensor] = (torch.cuda if kind == "cuda" else torch.xpu).get_rng_state_all()
    return states


def _check_devices(kind: str, states: Any) -> None:
    if type(states) is not list:
        raise StateMismatchError(f"random state {kind!r} is not a list of device states", path=f"rng/{kind}")
    if kind == "mps":
        count = int(torch.backends.mps.is_available())
    else:
        module = torch.cuda if kind == "cuda" else torch.xpu
        count = module.device_count() if module.is_available() else 0
    if len(states) > count:
        raise StateMismatchError(
            f"random state of {kind} was saved for {len(states)} devices, this process sees {count}",
            path=f"rng/{kind}",
        )


def _device_setter(kind: str) -> Callable[[Any], None]:
    def set_all(states: list[Any]) -> None:
        for index, state in enumerate(states):
            if kind == "mps":
                torch.mps.set_rng_state(_to_tensor(state))
            else:
                (torch.cuda if kind == "cuda" else torch.xpu).set_rng_state(_to_tensor(state), index)

    return set_all
