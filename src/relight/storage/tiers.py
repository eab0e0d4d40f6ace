"""Tiers: the places that checkpoints go to, nearest first, and how much each of them gets and keeps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from relight.errors import ConfigError
from relight.storage.local import local_path
from relight.units import parse_rate

__all__ = ["RAM", "Scope", "Tier", "TierLike", "parse_tiers", "tier_url"]

RAM = "ram"
"""URL of the tier in the node's own memory, which survives the processes but not the node."""

Scope = Literal["auto", "shared", "node"]
"""Who sees a tier's files: every node, this node only, or to be found out by a probe."""

_KINDS = 'a tier is "ram", a directory (path or file:///path), or relight.Tier of one of these'


@dataclass(frozen=True, slots=True, init=False)
class Tier:
    """One place that checkpoints go to. Immutable, and checked when made.

    Attributes:
        url: "ram", or where the files go, as ``file:///absolute/path`` whatever spelling was given.
        every: the tier gets every n-th checkpoint.
        keep: how many of the newest verified checkpoints stay, at least 1.
        keep_every: checkpoints whose step is a multiple of this stay for good; None for none.
        scope: "shared" when all nodes see the same files, "node" when each has its own, "auto" to find out.
        bandwidth: limit for writing in bytes per second, given as a number or as "200MB/s"; None for no limit.

    Raises:
        ConfigError: a value makes no sense; the message says what to write instead.
    """

    url: str
    every: int
    keep: int
    keep_every: int | None
    scope: Scope
    bandwidth: float | None

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int = 3,
        keep_every: int | None = None,
        scope: Scope = "auto",
        bandwidth: float | str | None = None,
    ) -> None:
        values = {
            "url": tier_url(url),
            "every": _count("every", every),
            "keep": _count("keep", keep),
            "keep_every": None if keep_every is None else _count("keep_every", keep_every),
            "scope": _scope(scope),
            "bandwidth": _rate(bandwidth),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


TierLike = str | os.PathLike[str] | Tier
"""What stands for a tier in `relight.Checkpointer`: a path, a URL, or a `Tier` with settings of its own."""


def tier_url(url: str | os.PathLike[str]) -> str:
    """Return the one spelling of a tier's URL, so that every way to write a place means the same place.

    Raises:
        ConfigError: there is no such kind of tier.
    """
    given = os.fspath(url) if isinstance(url, str | os.PathLike) else url
    if not isinstance(given, str):
        raise ConfigError(f"{url!r} is no tier: {_KINDS}")
    if given == RAM:
        return RAM
    if given == "peer" or ("://" in given and not given.startswith("file://")):
        raise ConfigError(f"{given!r}: this version has no such tier; {_KINDS}", tier=given)
    return f"file://{local_path(given)}"


def parse_tiers(value: TierLike | Sequence[TierLike], *, keep: int = 3) -> tuple[Tier, ...]:
    """Return the tiers that a user wrote, nearest first.

    One place alone gets memory in front of it: snapshots then survive the training processes before they are
    on disk. A list is taken as it is.

    Args:
        value: a path, a URL or a `Tier`, or a list of them.
        keep: for those that are not `Tier`s already.

    Raises:
        ConfigError: a tier makes no sense, is given twice, or no tier is durable.
    """
    if isinstance(value, str | os.PathLike | Tier):
        alone = value if isinstance(value, Tier) else Tier(value, keep=keep)
        tiers: tuple[Tier, ...] = (alone,) if alone.url == RAM else (Tier(RAM, keep=keep), alone)
    elif isinstance(value, Sequence):
        tiers = tuple(item if isinstance(item, Tier) else Tier(item, keep=keep) for item in value)
    else:
        raise ConfigError(f"tiers={value!r}: give a path, a URL, a relight.Tier, or a list of them")
    urls = [tier.url for tier in tiers]
    if set(urls) <= {RAM}:
        raise ConfigError(
            f'tiers={value!r}: none outlives this machine; give a directory, such as "runs/gpt"'
        )
    for at, url in enumerate(urls):
        if url in urls[:at]:
            raise ConfigError(f"tiers: {url} is given twice", tier=url)
        if url == RAM and at > 0:
            raise ConfigError('tiers: "ram" is the nearest tier; put it first', tier=url)
    return tiers


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"Tier({name}={value!r}): give a whole number of 1 or more")
    return value


def _scope(value: Scope) -> Scope:
    if value not in get_args(Scope):
        raise ConfigError(f'Tier(scope={value!r}): give "auto", "shared" or "node"')
    return value


def _rate(value: float | str | None) -> float | None:
    rate = parse_rate(value) if isinstance(value, str) else value
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
        raise ConfigError(f'Tier(bandwidth={value!r}): give bytes per second, or text such as "200MB/s"')
    return None if rate is None else float(rate)
