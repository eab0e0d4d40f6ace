"""The way from a path to what a foreign checkpoint holds, whatever its format; it is found out where none is given."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from relight.errors import ConfigError, MissingCopyError, UnknownFormatError
from relight.manifest.foreign.dcp_files import METADATA_NAME, describe, read_dcp
from relight.manifest.foreign.safetensors_files import read_index_file, read_safetensors
from relight.manifest.foreign.source import Found, Source
from relight.manifest.foreign.torch_archive import Archive, ArchivePlace, ArchiveTensor, walk
from relight.storage.backend import StorageBackend
from relight.storage.local import LocalBackend, local_path

__all__ = ["Format", "open_source", "target_format"]

Format = Literal["hf", "safetensors", "torch", "dcp"]
"""Hugging Face's directory, one safetensors file, a file of `torch.save`, a directory of torch's DCP."""

_INDEX = ".safetensors.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ZIP = b"PK\x03\x04"


def target_format(target: str, chosen: Format | None) -> Format:
    """Return the format to write `target` in: the chosen one, or what its suffix says, or Hugging Face's."""
    if chosen is not None:
        return chosen
    suffix = PurePath(target).suffix
    if suffix == ".safetensors":
        return "safetensors"
    return "torch" if suffix in _TORCH_SUFFIXES else "hf"


def open_source(source: str, chosen: Format | None = None, *, check: bool = True) -> Source:
    """Return what the checkpoint at `source` holds; its tensors are read later, nothing is executed.

    Args:
        source: a path or ``file:///path`` of a file or directory.
        chosen: its format; default: what is there decides.
        check: compare what is read with the CRC-32 that archives of torch hold.

    Raises:
        MissingCopyError: it is not there.
        ConfigError: it is not of the chosen format.
        CorruptionError: it cannot be read.
        UnknownFormatError: its format is none of those known, or it holds what relight cannot store.
    """
    path = local_path(source)
    if path.is_dir():
        return _open_folder(LocalBackend(path), chosen, check=check)
    backend = LocalBackend(path.parent)
    size_bytes = backend.size_bytes(path.name)
    if size_bytes is None:
        raise MissingCopyError(f"{path} is not there", path=str(path))
    if path.name.endswith(_INDEX):
        _agree(path.name, chosen, "hf")
        return _open_sharded(backend, path.name)
    first = bytearray(min(9, size_bytes))
    backend.read_into(path.name, 0, memoryview(first))
    if first[:4] == _ZIP:
        _agree(path.name, chosen, "torch")
        return read_torch(backend, path.name, size_bytes, check=check)
    if first[8:] == b"{" or chosen == "safetensors":
        _agree(path.name, chosen, "safetensors")
        return read_safetensors(backend, [path.name])
    raise UnknownFormatError(
        f"{path} is no safetensors file and no archive of torch.save; files that torch wrote before 1.6 must be loaded "
        "and saved again",
        path=str(path),
    )


def read_torch(backend: StorageBackend, name: str, size_bytes: int, *, check: bool) -> Source:
    """Return what a file of `torch.save` holds: tensors in nested dicts and lists.

    Views of one storage with equal sizes and strides are one tensor with several names.

    Raises:
        CorruptionError: it cannot be read.
        UnknownFormatError: it holds a tensor that is not plain.
    """
    place = ArchivePlace(backend=backend, name=name, start_bytes=0, num_bytes=size_bytes)
    found: list[Found] = []
    skipped: list[tuple[str, str]] = []
    aliases: dict[tuple[str, ...], tuple[str, ...]] = {}
    kept: dict[tuple[object, ...], tuple[str, ...]] = {}
    for path, leaf in walk(Archive(place, check=check).content):
        keys = path or ("value",)
        if not isinstance(leaf, ArchiveTensor):
            skipped.append((".".join(keys), describe(leaf)))
            continue
        view = (leaf.dtype, leaf.shape, leaf.storage)
        if kept.setdefault(view, keys) != keys:
            aliases[keys] = kept[view]
        else:
            tensor = leaf.named(".".join(keys), (int(leaf.storage[0]) if leaf.storage[0].isdecimal() else 0,))
            found.append(Found(path=keys, tensor=tensor))
    return Source(format="torch", tensors=found, aliases=aliases, skipped=skipped)


def _open_folder(backend: LocalBackend, chosen: Format | None, *, check: bool) -> Source:
    names = sorted(file.name for file in backend.list() if "/" not in file.name)
    if METADATA_NAME in names:
        _agree(backend.url, chosen, "dcp")
        return read_dcp(backend, check=check)
    indexes = [name for name in names if name.endswith(_INDEX)]
    shards = [name for name in names if name.endswith(".safetensors")]
    if len(indexes) > 1 or (not indexes and len(shards) > 1):
        several = ", ".join(indexes or shards)
        raise ConfigError(f"{backend.url} holds several: {several}; give the path of one", path=backend.url)
    if not indexes and not shards:
        raise UnknownFormatError(
            f"{backend.url} holds neither .metadata (DCP) nor .safetensors files; give the path of a file",
            path=backend.url,
        )
    _agree(backend.url, chosen, "hf")
    return _open_sharded(backend, indexes[0]) if indexes else read_safetensors(backend, shards)


def _open_sharded(backend: LocalBackend, index_name: str) -> Source:
    weight_map = read_index_file(backend, index_name)
    return read_safetensors(backend, sorted(set(weight_map.values())), weight_map=weight_map)


def _agree(where: str, chosen: Format | None, seen: Format) -> None:
    if chosen is not None and chosen != seen:
        raise ConfigError(f"{where} is of format {seen}, not {chosen}", path=where)
