"""Named points of the save, seal, drain, commit and retention protocols, announced as they are passed.

A tracer, a profiler or the test kit subscribes; with no subscriber a point costs one truth test.
Must not import anything of relight.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["reached", "subscribe", "unsubscribe"]

Observer = Callable[[str], None]

_observers: list[Observer] = []


def reached(point: str) -> None:
    """Announce that `point` (a dotted name such as ``"drain.image_renamed"``) has been passed in this process."""
    if _observers:
        for observer in tuple(_observers):
            observer(point)


def subscribe(observer: Observer) -> None:
    """Call `observer(point)` at every point from now on, in the thread that passes it."""
    _observers.append(observer)


def unsubscribe(observer: Observer) -> None:
    """Stop calling `observer`; unknown observers raise ValueError."""
    _observers.remove(observer)
