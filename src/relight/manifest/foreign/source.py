"""What a foreign checkpoint holds, whatever its format, and how its names become keys of a train state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from relight.errors import ConfigError
from relight.manifest.assembly import Tensor

__all__ = ["Found", "Source", "key_of", "keys_of", "name_of"]

MODEL = "model/"
"""What the keys of a run's only model begin with; names in other formats go without it."""

_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_IS_KEY = re.compile(r"(?:model|optimizer|scheduler|scaler|data|extra)(?:\.[^/]+)?/.+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One tensor of a foreign checkpoint, and the keys under which it lies in nested dicts, outermost first."""

    path: tuple[str, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The content of a foreign checkpoint.

    Attributes:
        format: "hf", "safetensors", "torch" or "dcp".
        tensors: what can be read, each stored content once.
        aliases: path of a further name of a tensor -> path under which it is among `tensors`.
        skipped: (name, reason) of what is there and is no tensor.
    """

    format: str
    tensors: Sequence[Found]
    aliases: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    skipped: Sequence[tuple[str, str]] = ()


def name_of(key: str) -> str:
    """Return what other formats call the tensor `key`: without ``model/``; keys of other parts stay as they are."""
    return key.removeprefix(MODEL)


def key_of(name: str) -> str:
    """Return the key of a tensor that other formats call `name`: the inverse of `name_of`."""
    return name if _IS_KEY.fullmatch(name) else MODEL + name


def keys_of(paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Return the key of each path.

    Where the outermost dict has a ``model`` (or ``state_dict``, ``model_state_dict``) with tensors in it, that is the
    model, and everything else becomes ``extra.<outermost key>/...``. Elsewhere everything is the model. The names of
    nested dicts are joined by dots.

    Raises:
        ConfigError: two paths would get one key.
    """
    listed = list(paths)
    outer = {path[0] for path in listed if len(path) > 1}
    model = next((name for name in _MODEL_KEYS if name in outer), None)
    keys: dict[tuple[str, ...], str] = {}
    taken: dict[str, tuple[str, ...]] = {}
    for path in listed:
        if model is None:
            key = key_of(".".join(path))
        elif path[0] == model and len(path) > 1:
            key = key_of(".".join(path[1:]))
        else:
            rest = ".".join(path[1:]) or "value"
            key = f"extra.{re.sub('[./]', '_', path[0])}/{rest}"
        if key in taken:
            raise ConfigError(
                f"{'.'.join(path)} and {'.'.join(taken[key])} would both become {key!r}; rename one", path=key
            )
        taken[key] = path
        keys[path] = key
    return keys
