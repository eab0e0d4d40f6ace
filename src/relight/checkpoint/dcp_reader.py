"""`relight.dcp.Reader`: the storage reader of `torch.distributed.checkpoint` for relight's format.

Everything is compared before a byte is read, and every block is checked before it reaches a tensor.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import io
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from relight.checkpoint import context
from relight.checkpoint.dcp_place import can_be_root, note_loaded, parse_root
from relight.checkpoint.dcp_source import Source, open_source
from relight.checkpoint.format import DTYPES
from relight.checkpoint.transfer import LoadPlan as TransferPlan
from relight.checkpoint.values import PerRank
from relight.errors import ConfigError, DesyncError, StateMismatchError
from relight.manifest.shard import Box, whole

__all__ = ["Reader"]

_log = logging.getLogger("relight.dcp")
_MAX_NAMED = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """Which checkpoint a rank has opened: travels to the coordinator with the rank's plan."""

    place: str
    manifest_digest: str


@dataclasses.dataclass(slots=True)
class _Target:
    """One tensor to fill: the planner's, or a stand-in of the stored dtype where a cast was allowed."""

    item: ReadItem
    tensor: torch.Tensor
    filled: torch.Tensor


class Reader(StorageReader):
    """Load what `relight.dcp.Writer` stored, into any layout.

    Refused, each with an error that names the key, before any tensor is changed: keys that the checkpoint lacks (unless
    the planner allows a partial load: then their targets stay as they are), keys that nobody asks for, other dtypes,
    other shapes. Every block that is read is checked against its digest; one that differs is an error that names file
    and block. Nothing that is stored is executed.

    Args:
        url: root of the run, a path or ``file:///path``, or the directory of one checkpoint. The `checkpoint_id` of a
            load stands in for it.
        step: which checkpoint; None for the newest that is committed and not marked "replicas differ".
        allow_extra: patterns of keys that may stay unread, such as ``["optimizer.*"]``; ``["*"]`` for all.
        allow_cast: patterns of keys whose values are converted to the dtype of their target.

    Raises:
        ConfigError: an argument makes no sense.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int | None = None,
        allow_extra: Iterable[str] = (),
        allow_cast: Iterable[str] = (),
    ) -> None:
        for name, patterns in (("allow_extra", allow_extra), ("allow_cast", allow_cast)):
            if isinstance(patterns, str):
                raise ConfigError(
                    f"Reader({name}={patterns!r}): give a list of patterns, such as [{patterns!r}]"
                )
        self._step = step
        self._allow_extra = tuple(allow_extra)
        self._allow_cast = tuple(allow_cast)
        self._source: Source | None = None
        self._rank = 0
        self._load_id = ""
        self.reset(url)

    # Called by torch.distributed.checkpoint, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Load from `checkpoint_id` from now on; None changes nothing."""
        self._source = None
        if checkpoint_id is not None:
            self._root = parse_root(checkpoint_id)

    # Without a parameter named kwargs, so that DCP does not try for metadata of single ranks when this fails.
    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Return what the chosen checkpoint holds.

        Raises:
            MissingCopyError: there is none.
            CorruptionError: it cannot be read as it was written.
            UnknownFormatError: another version of relight wrote it.
        """
        self._load_id = uuid.uuid4().hex
        self._source = open_source(self._root, self._step)
        return self._source.metadata(self._load_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Note which rank this is."""
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which checkpoint this rank has opened."""
        source = self._opened()
        opened = _Opened(source.place, source.manifest_digest)
        return dataclasses.replace(plan, storage_data=opened)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check on the coordinator that all ranks read one checkpoint, and all of it.

        Raises:
            DesyncError: the ranks have opened different checkpoints.
            StateMismatchError: keys that nobody asks for, or values of single ranks for another number of ranks.
        """
        source = self._opened()
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                places = [getattr(one.storage_data, "place", "nothing") for one in (plans[0], plan)]
                raise DesyncError(
                    f"ranks 0 and {rank} load different checkpoints, {places[0]} and {places[1]}; was one committed "
                    "just now? Load again, or say which with Reader(step=...)",
                    rank=rank,
                )
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        self._check_extra(source, asked)
        own = sorted(asked & source.contents.per_rank)
        if own and len(plans) != source.manifest.world_size:
            raise StateMismatchError(
                f"{', '.join(own[:_MAX_NAMED])}: each of {source.manifest.world_size} ranks saved a value of its own, "
                f"which cannot be shared out to {len(plans)}",
                path=own[0],
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's targets.

        Raises:
            StateMismatchError: a dtype, a shape or a kind of value differs; nothing was changed.
            CorruptionError: a block differs from its digest; targets may be partly filled, with checked bytes only.
        """
        source = self._opened()
        _tell_missing(planner, source)
        work = TransferPlan()
        targets = self._targets(plan, planner, source)
        for target in targets:
            _add_part(work, source, target)
        values = [
            (item, self._value(work, source, planner, item))
            for item in plan.items
            if item.type is LoadItemType.BYTE_IO
        ]
        work.run()
        for target in targets:
            if target.filled is not target.tensor:
                with torch.no_grad():
                    target.tensor.copy_(target.filled)
            planner.commit_tensor(target.item, target.tensor)
        for item, value in values:
            planner.load_bytes(item, _as_bytes(value))
        note_loaded(source.catalog.backend.url, source.step, source.generation)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether `checkpoint_id` can name a place."""
        return can_be_root(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """Where is read from: the checkpoint once it is chosen, before that the root."""
        return self._source.place if self._source is not None else self._root.url

    def _opened(self) -> Source:
        if self._source is None:
            raise ConfigError("read_metadata() comes before anything else is read")
        return self._source

    def _check_extra(self, source: Source, asked: set[str]) -> None:
        extra = [
            name
            for name in source.names()
            if name not in asked
            # Nobody has anything to read of a tensor without elements.
            and not source.is_empty(name)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._allow_extra)
        ]
        if extra:
            raise StateMismatchError(
                f"{source.place} holds {len(extra)} keys that the state dict does not ask for: {_listed(extra)}; if "
                'they are to stay unread, say so with Reader(allow_extra=["..."])',
                path=extra[0],
            )

    def _targets(self, plan: LoadPlan, planner: LoadPlanner, source: Source) -> list[_Target]:
        """Resolve and check every tensor that the plan fills."""
        targets, problems = [], []
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                continue
            name = item.storage_index.fqn
            tensor = planner.resolve_tensor(item).detach()
            dtype = DTYPES[source.entry(name).dtype]
            if tensor.is_meta:
                problems.append(f"{name}: the target is on the meta device and has no memory to load into")
            elif tuple(tensor.shape) != tuple(item.lengths):
                problems.append(f"{name}: saved part {tuple(item.lengths)}, target {tuple(tensor.shape)}")
            elif tensor.dtype == dtype and not tensor.is_neg():
                targets.append(_Target(item, tensor, tensor))
            elif tensor.dtype == dtype or any(fnmatch.fnmatchcase(name, one) for one in self._allow_cast):
                targets.append(_Target(item, tensor, torch.empty(tensor.shape, dtype=dtype)))
            else:
                problems.append(f"{name}: saved {dtype}, target {tensor.dtype}")
        if problems:
            raise StateMismatchError(
                f"{source.place} and the state dict differ: {_listed(problems, '; ')}; values are converted only where "
                'Reader(allow_cast=["..."]) says so',
                path=problems[0].partition(":")[0],
                rank=self._rank,
            )
        return targets

    def _value(self, work: TransferPlan, source: Source, planner: LoadPlanner, item: ReadItem) -> Any:
        """Decode what is no tensor; tensors within it are filled when `work` runs."""
        name = item.storage_index.fqn
        live = getattr(planner, "state_dict", {})
        if isinstance(live, dict) and isinstance(live.get(item.dest_index.fqn), torch.Tensor):
            raise StateMismatchError(
                f"{name}: saved as a value that is no tensor, the target is one", path=name
            )
        is_own = name in source.contents.per_rank

        def fetch(key: str) -> torch.Tensor:
            if is_own:
                dtype, shape = source.record(self._rank).draft.local[key]
                pieces = [(self._rank, key, whole(shape))]
            else:
                entry = source.entry(key)
                dtype, shape = entry.dtype, entry.shape
                pieces = [(piece.rank, piece.name, piece.box) for piece in source.pieces(key)]
            tensor = torch.empty(shape, dtype=DTYPES[dtype])
            for rank, entry_name, box in pieces:
                start = source.start_bytes(rank, entry_name, box.num_elements * tensor.element_size())
                work.add_box(source.image(rank), start, box, tensor, whole(shape))
            return tensor

        stored = source.own_value(name, self._rank) if is_own else source.contents.objects[name]
        value = context.decode(stored, tensors=fetch)
        return PerRank(value) if is_own else value


def _add_part(work: TransferPlan, source: Source, target: _Target) -> None:
    """Plan the reads of one item: the part of a stored piece that it wants."""
    item = target.item
    piece = source.piece(item.storage_index.fqn, tuple(item.storage_index.offset or ()))
    held = Box(tuple(map(int.__add__, piece.offsets, item.storage_offsets)), tuple(item.lengths))
    if not held.num_elements:
        return
    num_bytes = piece.box.num_elements * target.filled.element_size()
    start = source.start_bytes(piece.rank, piece.name, num_bytes)
    work.add_box(source.image(piece.rank), start, piece.box, target.filled, held)


def _tell_missing(planner: LoadPlanner, source: Source) -> None:
    """Say in the log which keys a partial load leaves as they are: torch has no other word for it."""
    live = getattr(planner, "state_dict", None)
    if isinstance(live, dict):
        held = source.contents.objects.keys() | source.contents.per_rank | source.index.entries.keys()
        left = sorted(live.keys() - held - source.manifest.aliases.keys())
        if left:
            _log.warning(
                "%s does not hold %d keys, which stay as they are: %s", source.place, len(left), _listed(left)
            )


def _as_bytes(value: Any) -> io.BytesIO:
    """Return what planners take: bytes of `torch.save`, made here from a value that was read as JSON."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return separator.join(names[:_MAX_NAMED]) + more
