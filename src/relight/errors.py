"""The error tree, by what the caller should do about it.

::

    RelightError
    |-- RetryableError            try again later, nothing is lost
    |   |-- StorageUnavailableError   a tier does not answer
    |   |-- StorageFullError          no space left on a tier
    |   |-- KeeperUnavailableError    the node's keeper cannot be reached or started
    |   `-- WaitTimeoutError          a wait ended before the step was durable
    |-- CopyError                 use another copy of the same bytes, or an older step
    |   |-- CorruptionError           stored bytes differ from their digest, or cannot be parsed
    |   |-- MissingCopyError          a file, slot or checkpoint is not there
    |   `-- TornSnapshotError         a tensor changed while it was copied
    |-- ConfigError (ValueError)  fix the script, the settings or the command line
    |   |-- UnitError                 a size, duration or rate cannot be read
    |   |-- StateMismatchError        saved and live state differ in names, shapes or dtypes
    |   |-- SettingsChangedError      settings that shape the trajectory differ from the saved ones
    |   |-- OwnershipError            ranks hold different values under one replicated key
    |   |-- CodecError                a value in the state has no codec
    |   |-- UnknownFormatError        a schema version, key or dtype that this version does not know
    |   |-- MemoryBudgetError         the arena does not fit into memory
    |   `-- MissingExtraError         an optional dependency is not installed
    `-- StopError                 stop and look: going on would lose or hide something
        |-- SaveFailedError           the last due checkpoint is not durable
        |-- FencedError               a newer generation of this run exists
        `-- DesyncError               ranks disagree on what they are doing

Every error carries the place it speaks of in attributes; messages say what, where and what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CodecError",
    "ConfigError",
    "CopyError",
    "CorruptionError",
    "DesyncError",
    "FencedError",
    "KeeperUnavailableError",
    "MemoryBudgetError",
    "MissingCopyError",
    "MissingExtraError",
    "OwnershipError",
    "RelightError",
    "RetryableError",
    "SaveFailedError",
    "SettingsChangedError",
    "StateMismatchError",
    "StopError",
    "StorageFullError",
    "StorageUnavailableError",
    "TornSnapshotError",
    "UnitError",
    "UnknownFormatError",
    "WaitTimeoutError",
]


class RelightError(Exception):
    """Any error that relight raises on purpose.

    Attributes:
        step: optimizer step concerned, or None.
        rank: global rank concerned, or None.
        tier: URL of the tier concerned, or None.
        path: file, key or slot concerned, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        tier: str | None = None,
        path: str | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.tier = tier
        self.path = path
        self.details = details


class RetryableError(RelightError):
    """Try again later; nothing is lost."""


class StorageUnavailableError(RetryableError):
    """A tier does not answer or answered with an I/O error."""


class StorageFullError(RetryableError):
    """A tier has no space left; `details` holds `needed_bytes` and `free_bytes` when known."""


class KeeperUnavailableError(RetryableError):
    """The node's keeper cannot be reached or started."""


class WaitTimeoutError(RetryableError, TimeoutError):
    """A wait ended before the step was durable."""


class CopyError(RelightError):
    """This copy cannot be used; another copy or an older step can."""


class CorruptionError(CopyError):
    """Stored bytes differ from their digest, or cannot be parsed; `details` may hold `block` (index)."""


class MissingCopyError(CopyError):
    """A file, slot or checkpoint is not there."""


class TornSnapshotError(CopyError):
    """A tensor changed while it was copied; the snapshot was dropped."""


class ConfigError(RelightError, ValueError):
    """The script, the settings or the command line must be fixed."""


class UnitError(ConfigError):
    """A size, duration or rate cannot be read."""


class StateMismatchError(ConfigError):
    """Saved and live state differ in names, shapes or dtypes; the message lists each key with both sides."""


class SettingsChangedError(ConfigError):
    """Settings that shape the trajectory differ from the saved ones; `details["changes"]` maps key to (old, new)."""


class OwnershipError(ConfigError):
    """Ranks hold different values under a key that counts as replicated."""


class CodecError(ConfigError):
    """A value in the state has no codec; the message says its path and how to register one."""


class UnknownFormatError(ConfigError):
    """A schema version, key or dtype that this version of relight does not know."""


class MemoryBudgetError(ConfigError):
    """The arena does not fit into the memory budget; `details` holds `needed_bytes` and `budget_bytes`."""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is not installed; the message names the install command."""


class StopError(RelightError):
    """Going on would lose or hide something."""


class SaveFailedError(StopError):
    """The last due checkpoint is not durable."""


class FencedError(StopError):
    """A newer generation of this run exists; this process must not commit."""


class DesyncError(StopError):
    """Ranks disagree on what they are doing (root, step, order of calls)."""
