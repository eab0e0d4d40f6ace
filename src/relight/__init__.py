"""relight keeps large PyTorch training runs going.

It saves the whole training state almost for free and restores it bit for bit. The names below load on first use,
so that tools which need no torch never import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relight import dcp, errors
    from relight.checkpoint.checkpointer import Checkpointer
    from relight.checkpoint.context import register_codec
    from relight.checkpoint.data import per_sample_rng
    from relight.checkpoint.sampler import ElasticSampler
    from relight.checkpoint.state import TrainState
    from relight.checkpoint.stream import FileStream
    from relight.checkpoint.values import PerRank
    from relight.storage.tiers import Tier

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "FileStream",
    "PerRank",
    "Tier",
    "TrainState",
    "dcp",
    "errors",
    "per_sample_rng",
    "register_codec",
]

__version__ = "0.1.0"

_HOMES = {
    "Checkpointer": "relight.checkpoint.checkpointer",
    "ElasticSampler": "relight.checkpoint.sampler",
    "FileStream": "relight.checkpoint.stream",
    "PerRank": "relight.checkpoint.values",
    "Tier": "relight.storage.tiers",
    "TrainState": "relight.checkpoint.state",
    "per_sample_rng": "relight.checkpoint.data",
    "register_codec": "relight.checkpoint.context",
}


def __getattr__(name: str) -> Any:
    if name in ("dcp", "errors"):
        return importlib.import_module(f"relight.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'relight' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from relight.errors import MissingExtraError

        raise MissingExtraError(f"relight.{name} needs torch: pip install 'relight[torch]'") from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
