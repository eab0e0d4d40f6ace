"""`relight.dcp.Writer`: the storage writer of `torch.distributed.checkpoint` that stores in relight's format.

Every rank writes its image and its record; the coordinator writes rank 0's record and the manifest when all ranks
have reported, so a save that fails anywhere has written no checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from relight.checkpoint import context
from relight.checkpoint.dcp_exchange import (
    LocalPart,
    RankPlan,
    RankReport,
    build_index,
    compare_ranks,
    make_plans,
)
from relight.checkpoint.dcp_image import RankContent, collect, fill_image, page_buffer
from relight.checkpoint.dcp_place import Place, begin, can_be_root, ended, parse_root
from relight.checkpoint.dcp_staging import copy_state, ensure_background
from relight.checkpoint.replicas import ReplicaMode
from relight.clock import SystemClock
from relight.errors import ConfigError, CorruptionError, OwnershipError, SaveFailedError
from relight.manifest.catalog import Catalog
from relight.manifest.manifest import Manifest, RankRecord, RecordDraft, encode_index
from relight.manifest.names import step_dir
from relight.policy.checkpoint import RetentionRule
from relight.storage.backend import open_backend

__all__ = ["CONTEXT_KEY", "Writer"]

CONTEXT_KEY = "dcp"
"""Under this key of its context a record says what a state dict of DCP holds beside tensors."""

_MAX_NAMED = 5
_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


class Writer(StorageWriter, AsyncStager):
    """Store what `dcp.save` and `dcp.async_save` are given in relight's format, and commit it last.

    A save that returns is durable, whole and committed; one that fails has touched no older checkpoint, and every
    rank gets the error. Nothing is written in place: saving again makes another checkpoint. Give every rank an equal
    writer.

    Args:
        url: root of the run, a path or ``file:///path``. The `checkpoint_id` of a save stands in for it. Where its last
            part speaks of a step (``step-1000``, ``epoch=3-step=1000.ckpt``), that is the step.
        step: number of the checkpoint; None for what the place's name says, else the next number that is free.
        compare: how ranks that hold the same value are compared: "full" looks at every byte, "sample" at the ends and
            the middle of each tensor and misses a change elsewhere, "off" stores one rank's value whatever the others
            hold.
        mark_differing: commit a checkpoint although such values differ, marked as "replicas differ", which no reader
            chooses by itself; by default the save fails and names keys and ranks.
        keep: how many verified checkpoints to keep at the place; older ones are removed once the new one is verified.
            None removes nothing.
        verify: read everything back before the save returns, and mark the checkpoint as verified; `keep` does so too.
        process_group: the one given to `dcp.async_save`, if that is not all ranks.

    Raises:
        ConfigError: an argument makes no sense.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int | None = None,
        compare: ReplicaMode = "full",
        mark_differing: bool = False,
        keep: int | None = None,
        verify: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ConfigError(f"Writer(step={step!r}): give a number of steps, 0 or more")
        if compare not in ("full", "sample", "off"):
            raise ConfigError(f'Writer(compare={compare!r}): give "full", "sample" or "off"')
        self._given_step = step
        self._compare: ReplicaMode = compare
        self._mark_differing = mark_differing
        self._rule = RetentionRule(keep=keep) if keep is not None else None
        self._verify = verify or keep is not None
        self._group = process_group
        self._spare: memoryview | None = None
        self.reset(url)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: DCP sends the writer to its background process."""
        return {**self.__dict__, "_group": None, "_spare": None}

    # Called by torch.distributed.checkpoint, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Save to `checkpoint_id` from now on; None changes nothing.

        Raises:
            ConfigError: it is the directory of a checkpoint that exists, or no place at all.
        """
        if checkpoint_id is None:
            return
        root = parse_root(checkpoint_id)
        if root.generation is not None:
            raise ConfigError(
                f"{os.fspath(checkpoint_id)} is one checkpoint's own directory, which is never written again; give the "
                f"root of the run, {root.url}, and Writer(step={root.step}) for that number"
            )
        self._url = root.url
        self._step = self._given_step if self._given_step is not None else root.step

    def storage_meta(self) -> StorageMeta:
        """Return what planners may know of the place."""
        return StorageMeta(checkpoint_id=self._url, save_id=uuid.uuid4().hex)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Begin a save.

        Raises:
            ConfigError: asked to save without talking to the other ranks.
        """
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False: relight commits what all ranks stored as one checkpoint, so they must talk"
            )
        # Plans that planners cache are compared without their dtypes, and bring the place of the save before along.
        for name in _CACHES:
            getattr(SavePlanner, name, {}).clear()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add what the coordinator needs to know of this rank."""
        if not plan.usable:
            raise ConfigError(
                "the planner caches its plan; relight.dcp.Writer needs one that was made for this save"
            )
        for item in plan.items:
            if not _is_unicode(item.index.fqn):
                raise ConfigError(
                    f"{item.index.fqn!a}: names must be valid Unicode", path=ascii(item.index.fqn)
                )
        part = LocalPart(url=self._url, step=self._step, items=tuple(plan.items))
        return dataclasses.replace(plan, storage_data=part)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the place of the save, on the coordinator, and tell every rank."""
        place = begin(Catalog(open_backend(self._url)), self._step)
        return [
            dataclasses.replace(plan, storage_data=told)
            for plan, told in zip(plans, make_plans(plans, place), strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items into an image and store it; durable after return.

        Raises:
            StorageFullError: no space is left.
            CodecError, UnknownFormatError, StateMismatchError: see `collect` and `fill_image`.
        """
        told = plan.storage_data
        if not isinstance(told, RankPlan):
            raise ConfigError(
                "the planner lost SavePlan.storage_data, in which relight tells each rank where to save"
            )
        content = collect(plan.items, told.compare, planner, told.rank, self._compare)
        layout = content.layout()
        buffer = self._take_buffer(layout.image_bytes)
        image = fill_image(content, layout, buffer)
        record = RankRecord(draft=_draft(told, content, image.data.nbytes), digests=image.digests)
        catalog = Catalog(open_backend(told.place.url))
        catalog.put_image(told.place.step, told.place.generation, told.rank, image.data)
        if told.rank != 0:
            catalog.put_record(record)
            self._read_back(catalog, told.place, told.rank)
        report = RankReport(
            place=told.place,
            rank=told.rank,
            record=record,
            tensors=content.tensors,
            objects=content.objects,
            inner=content.inner,
            per_rank=list(content.own),
            digests=content.digests,
        )
        # Kept for the next save: memory that was never touched is slow to fill.
        self._spare = buffer
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex("rank"), image.data.nbytes, report)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks stored, on the coordinator; durable after return.

        Raises:
            OwnershipError: ranks hold different values under one key.
            StateMismatchError: the pieces of a tensor do not make it up.
            SaveFailedError: the files of some rank are not to be seen from here.
        """
        reports = sorted(
            (result.storage_data for part in results for result in part), key=lambda report: report.rank
        )
        place = reports[0].place
        differ = compare_ranks(reports)
        if differ and not self._mark_differing:
            raise _ownership_error(differ)
        catalog = Catalog(open_backend(place.url))
        catalog.put_record(_whole_record(reports, metadata, differ))
        self._read_back(catalog, place, 0)
        manifest = catalog.commit(place.step, place.generation)
        if manifest is None:
            raise _incomplete(catalog, place, len(reports))
        ended(place)
        self._keep(catalog, manifest)
        folder = step_dir(place.step, place.generation)
        metadata.storage_meta = StorageMeta(checkpoint_id=f"{place.url}/{folder}", save_id=manifest.run)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether `checkpoint_id` can name a place."""
        return can_be_root(checkpoint_id)

    # Staging, for dcp.async_save

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state on the host, which is what is stored whatever training changes meanwhile."""
        ensure_background(self._group)
        return copy_state(state_dict)

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has copied everything."""

    def close(self) -> None:
        """Give back memory that is kept for the next save."""
        self._spare = None

    @property
    def checkpoint_id(self) -> str:
        """Where saves go."""
        return self._url

    def _take_buffer(self, num_bytes: int) -> memoryview:
        """Return memory for an image that no other save works on."""
        spare, self._spare = self._spare, None
        if spare is None or not num_bytes <= spare.nbytes <= 2 * num_bytes:
            return page_buffer(num_bytes)
        return spare

    def _read_back(self, catalog: Catalog, place: Place, rank: int) -> None:
        if self._verify:
            problems = catalog.verify_rank(place.step, place.generation, rank)
            if problems:
                raise CorruptionError(
                    f"read back after writing: {problems[0].message}",
                    path=problems[0].file,
                    rank=rank,
                    step=place.step,
                )

    def _keep(self, catalog: Catalog, manifest: Manifest) -> None:
        if self._verify:
            catalog.mark_verified(manifest.step, manifest.generation)
        if self._rule is not None:
            catalog.apply_retention(self._rule, protect=[(manifest.step, manifest.generation)])


def _draft(told: RankPlan, content: RankContent, image_bytes: int) -> RecordDraft:
    own = {"per_rank": content.own} if content.own else {}
    return RecordDraft(
        run=told.place.run,
        step=told.place.step,
        generation=told.place.generation,
        parent=told.place.parent,
        rank=told.rank,
        world_size=told.world_size,
        layout=told.layout,
        image_bytes=image_bytes,
        saved_at=SystemClock().now(),
        context=_raw({CONTEXT_KEY: own}),
        local=content.local,
    )


def _whole_record(
    reports: Sequence[RankReport], metadata: Metadata, differ: dict[str, tuple[int, ...]]
) -> RankRecord:
    """Return rank 0's record, which speaks for all ranks."""
    index, layouts = build_index(reports)
    first = reports[0].record
    known = context.loads(bytes(first.draft.context))[CONTEXT_KEY]
    objects: dict[str, Any] = {}
    for report in reports:
        objects |= report.objects
    per_rank = sorted({name for report in reports for name in report.per_rank})
    said = {
        "objects": objects,
        "inner": sorted({name for report in reports for name in report.inner}),
        "per_rank_names": per_rank,
        "planner": context.encode(metadata.planner_data, path="the planner's data"),
    }
    draft = msgspec.structs.replace(
        first.draft,
        context=_raw({CONTEXT_KEY: known | said}),
        index=encode_index(index),
        layouts=layouts,
        replicas_differ=tuple(differ),
    )
    return msgspec.structs.replace(first, draft=draft)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(context.dumps(value))


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ownership_error(differ: dict[str, tuple[int, ...]]) -> OwnershipError:
    named = [
        f"{name} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
        for name, ranks in list(differ.items())[:_MAX_NAMED]
    ]
    more = f" and {len(differ) - _MAX_NAMED} more" if len(differ) > _MAX_NAMED else ""
    return OwnershipError(
        f"ranks hold different values under one key: {'; '.join(named)}{more}. DCP keeps one of them; wrap a value "
        "that belongs to its rank in relight.PerRank(value), give it a key of its own, or use "
        "Writer(mark_differing=True)",
        path=next(iter(differ)),
    )


def _incomplete(catalog: Catalog, place: Place, num_ranks: int) -> SaveFailedError:
    folder = f"{step_dir(place.step, place.generation)}/"
    seen = {file.name.removeprefix(folder) for file in catalog.backend.list(folder)}
    wanted = [f"rank-{rank:05d}{suffix}" for rank in range(num_ranks) for suffix in (".safetensors", ".json")]
    missing = [name for name in wanted if name not in seen]
    return SaveFailedError(
        f"{catalog.backend.url}/{folder}: {', '.join(missing[:_MAX_NAMED])} cannot be seen from the coordinator; is "
        "the place shared by all ranks?",
        step=place.step,
    )
