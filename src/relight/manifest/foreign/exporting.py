"""Export: tensors of a checkpoint to a foreign format, read back and compared before the target gets its name."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from relight.errors import ConfigError, CorruptionError
from relight.manifest.assembly import Tensor
from relight.manifest.foreign.copying import Copier
from relight.manifest.foreign.dcp_files import METADATA_NAME, write_dcp
from relight.manifest.foreign.opening import Format, open_source
from relight.manifest.foreign.safetensors_files import (
    INDEX_NAME,
    encode_index_file,
    ordered,
    shard_names,
    split_shards,
    write_safetensors,
)
from relight.manifest.foreign.source import name_of
from relight.manifest.foreign.staging import Stage
from relight.manifest.foreign.torch_writer import write_state_dict
from relight.storage.files import Files

__all__ = ["Chosen", "Exported", "choose_keys", "export_tensors", "names_of"]

_OURS = {"hf": (INDEX_NAME, ".safetensors"), "dcp": (METADATA_NAME, ".distcp")}
"""The formats whose target is a directory, and what names of files in it end with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is exported: `keys` of stored tensors under the key to be named by, and their further names.

    Attributes:
        keys: key that gives the name -> key under which the tensor is stored.
        aliases: further key -> one of `keys`.
    """

    keys: Mapping[str, str]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: (name, bytes) of each file; all of it was read back and was right."""

    files: Sequence[tuple[str, int]]


def choose_keys(
    keys: Iterable[str],
    aliases: Mapping[str, str],
    *,
    parts: Sequence[str] = ("model",),
    patterns: Sequence[str] = (),
) -> Chosen:
    """Return what belongs to `parts`, or with `patterns` what one of them matches.

    Args:
        keys: of all stored tensors.
        aliases: further key of a tied tensor -> key under which it is stored.
        parts: names such as "model", "optimizer", or with a name of their own "model.gen".
        patterns: shell patterns on keys, with or without the part in front.

    Raises:
        ConfigError: nothing is left.
    """

    def is_wanted(key: str) -> bool:
        part, _, short = key.partition("/")
        if patterns:
            return any(fnmatch.fnmatchcase(name, pattern) for name in (key, short) for pattern in patterns)
        return part in parts or part.partition(".")[0] in parts

    chosen = {key: key for key in keys if is_wanted(key)}
    named_by = dict(chosen)
    further: dict[str, str] = {}
    for alias, stored in aliases.items():
        if not is_wanted(alias):
            continue
        if named_by.setdefault(stored, alias) == alias:
            chosen[alias] = stored
        else:
            further[alias] = named_by[stored]
    if not chosen:
        wanted = ", ".join(patterns or parts)
        raise ConfigError(f"no tensor of {wanted} is in the checkpoint; `relight show --tensors` lists all")
    return Chosen(keys=chosen, aliases=further)


def names_of(chosen: Chosen, tensors: Iterable[Tensor]) -> tuple[list[Tensor], dict[str, str]]:
    """Return the tensors in the order of storage under the names that other formats give them, and further names.

    Args:
        chosen: see `choose_keys`.
        tensors: those of `chosen.keys`, in that order.
    """
    named = [
        dataclasses.replace(tensor, name=name_of(key))
        for key, tensor in zip(chosen.keys, tensors, strict=True)
    ]
    further = {name_of(alias): name_of(key) for alias, key in chosen.aliases.items()}
    return sorted(named, key=lambda tensor: tensor.place), further


def export_tensors(
    target: str,
    kind: Format,
    tensors: Sequence[Tensor],
    aliases: Mapping[str, str],
    *,
    shard_bytes: int,
    force: bool = False,
    advance: Callable[[int], None] = lambda _: None,
    files: Files | None = None,
) -> Exported:
    """Write `tensors` to `target`; it gets its name only after everything was read back and was equal.

    Args:
        target: file, or with "hf" and "dcp" directory.
        kind: the format.
        tensors: in the order of storage.
        aliases: further name -> name of one of `tensors`.
        shard_bytes: with "hf" and "dcp", how large a file may become; a larger tensor has a file of its own.
        force: replace an earlier target.
        advance: told the bytes of each piece that was written, and once more when it was read back.
        files: the file calls.

    Raises:
        ConfigError: the target exists, or its place does not.
        CorruptionError: a block of the checkpoint differs from its digest, or what was read back from what was written.
        StorageFullError: no space.
    """
    copier = Copier(advance)
    is_folder = kind in _OURS
    with Stage(target, is_folder=is_folder, force=force, ours=_OURS.get(kind, ()), files=files) as stage:
        _write(stage, kind, tensors, aliases, copier, shard_bytes=shard_bytes)
        written = stage.folder if is_folder else stage.folder / stage.target.name
        _compare(str(written), kind, tensors, aliases, copier)
        sizes = sorted((path.name, path.stat().st_size) for path in stage.folder.iterdir())
        stage.publish()
    return Exported(files=sizes)


def _write(
    stage: Stage,
    kind: Format,
    tensors: Sequence[Tensor],
    aliases: Mapping[str, str],
    copier: Copier,
    *,
    shard_bytes: int,
) -> None:
    if kind == "dcp":
        write_dcp(stage, tensors, aliases, copier.copy, file_bytes=shard_bytes)
    elif kind == "torch":
        with stage.output(stage.target.name) as output:
            write_state_dict(output, tensors, aliases, copier.copy)
    elif kind == "safetensors":
        with stage.output(stage.target.name) as output:
            write_safetensors(output, ordered(tensors), aliases, copier.copy)
    else:
        cut = split_shards(tensors, shard_bytes)
        shards = list(zip(shard_names(len(cut)), cut, strict=True))
        for name, members in shards:
            held = {tensor.name for tensor in members}
            further = {alias: kept for alias, kept in aliases.items() if kept in held}
            with stage.output(name) as output:
                write_safetensors(output, ordered(members), further, copier.copy)
        if len(shards) > 1:
            with stage.output(INDEX_NAME) as output:
                output.write(encode_index_file(shards))


def _compare(
    written: str, kind: Format, tensors: Sequence[Tensor], aliases: Mapping[str, str], copier: Copier
) -> None:
    """Read everything back the way an import would, and refuse any difference."""
    source = open_source(written, kind)
    found = {".".join(one.path): one.tensor for one in source.tensors}
    further = {".".join(alias): ".".join(kept) for alias, kept in source.aliases.items()}
    expected = {tensor.name: tensor for tensor in tensors}
    if found.keys() != expected.keys() or further != dict(aliases):
        strange = sorted((found.keys() ^ expected.keys()) | (further.keys() ^ aliases.keys()))
        raise CorruptionError(
            f"{written}: read back, the names differ: {', '.join(strange[:5])}", path=written
        )
    for name, tensor in found.items():
        wanted = expected[name]
        is_same = (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
        if not is_same or copier.digest(tensor) != copier.digests[name]:
            raise CorruptionError(
                f"{written}: {name!r} read back differs from what was written; check the disk", path=written
            )
