"""`relight export` and `relight import`: to and from the checkpoint formats of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from relight.cli.exits import OK, warn
from relight.cli.progress import progress
from relight.cli.runs import choose_step, open_run, print_json
from relight.errors import ConfigError

if TYPE_CHECKING:
    from relight.manifest.assembly import Tensor
    from relight.manifest.catalog import CheckpointInfo
    from relight.manifest.foreign.exporting import Chosen
    from relight.manifest.tensors import CheckpointTensors

__all__ = ["export", "import_"]

_Format = Annotated[Literal["hf", "safetensors", "torch", "dcp"] | None, Parameter(name="--format")]
_Words = Annotated[list[str] | None, Parameter(negative="")]
_SHOWN = 5
_WITHOUT_COMPLEX = ("hf", "safetensors")


def export(
    url: str,
    target: str,
    /,
    *,
    step: int | None = None,
    format_: _Format = None,
    parts: _Words = None,
    keys: _Words = None,
    rank: int = 0,
    shard_size: str = "5GB",
    dtype: str | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Write a checkpoint's tensors in another format.

    Every block that is read is checked against its digest, everything that is written is read back and compared, and
    only then the target gets its name. Names go without the `model/` in front; keys of other parts stay as they are.

    Args:
        url: Root of the run.
        target: File, or for hf and dcp directory, to be made.
        step: Which checkpoint; default: the newest that a restore would choose.
        format_: hf (safetensors with an index), safetensors (one file), torch (torch.save) or dcp
            (torch.distributed.checkpoint); default: what the target's suffix says, else hf.
        parts: Parts of the state to export; default: model.
        keys: Shell patterns of keys to export, in place of parts.
        rank: Whose value to take of tensors of which every rank has its own.
        shard_size: How large a file of hf and dcp may become.
        dtype: Cast floating tensors to this dtype; default: none is cast.
        force: Replace an earlier export.
        json: Print JSON instead of text.
    """
    from relight.manifest.foreign.exporting import export_tensors, names_of
    from relight.manifest.foreign.opening import target_format
    from relight.units import parse_bytes

    shard_bytes, kind = parse_bytes(shard_size), target_format(target, format_)
    info, stored, chosen = _choose(url, step, rank, parts, keys)
    tensors, aliases = names_of(chosen, map(stored.tensor, chosen.keys.values()))
    cast = _cast(tensors, dtype) if dtype is not None else {}
    found = _describe(info, stored, chosen, tensors, kind=kind)
    if not json:
        _warn_of(found, rank)
    with progress("exporting", 2 * found["bytes"]) as advance:
        done = export_tensors(
            target, kind, tensors, aliases, shard_bytes=shard_bytes, force=force, advance=advance
        )
    if json:
        files = [{"name": name, "bytes": size} for name, size in done.files]
        print_json(
            found | {"target": target, "aliases": aliases, "cast": cast, "files": files, "verified": True}
        )
        return OK
    print(
        f"exported step {info.step} of generation {info.generation} as {kind}: {_amount(tensors)}, files: "
        f"{len(done.files)}; read back, equal" + (f"; {len(cast)} cast to {dtype}" if cast else "")
    )
    return OK


def import_(
    source: str,
    url: str,
    /,
    *,
    step: int = 0,
    format_: _Format = None,
    ignore_crc: bool = False,
    force: bool = False,
    json: bool = False,
) -> int:
    """Make a run with one checkpoint out of another format.

    Nothing of the source is executed. What is stored has digests and is read back before the end. Names get `model/`
    in front; a file or directory with a model among other things keeps these as `extra.*`.

    Args:
        source: File, index file or directory: safetensors, torch.save or torch.distributed.checkpoint.
        url: Root of the run to be made.
        step: Number of the checkpoint.
        format_: What the source is; default: found out.
        ignore_crc: Take what differs from the CRC-32 that archives of torch hold.
        force: Into a run that is there: as its next generation, from which it would go on.
        json: Print JSON instead of text.
    """
    from relight.manifest.catalog import Catalog
    from relight.manifest.foreign.importing import import_source
    from relight.manifest.foreign.opening import open_source
    from relight.storage.backend import open_backend

    if step < 0:
        raise ConfigError(f"--step {step}: steps count from 0")
    opened = open_source(source, format_, check=not ignore_crc)
    if not json:
        _warn_of_skipped(opened.skipped)
    with progress("importing", 2 * sum(found.tensor.num_bytes for found in opened.tensors)) as advance:
        done = import_source(opened, Catalog(open_backend(url)), step=step, force=force, advance=advance)
    if json:
        print_json(
            {
                "source": source,
                "format": opened.format,
                "url": url,
                "step": done.step,
                "generation": done.generation,
                "tensors": done.num_tensors,
                "bytes": done.num_bytes,
                "aliases": dict(done.aliases),
                "skipped": [{"name": name, "reason": reason} for name, reason in opened.skipped],
                "verified": True,
            }
        )
    else:
        amount = _amount([found.tensor for found in opened.tensors])
        print(f"imported {opened.format} as step {done.step} of {url}: {amount}; read back, good")
    return OK


def _choose(
    url: str, step: int | None, rank: int, parts: Sequence[str] | None, keys: Sequence[str] | None
) -> tuple[CheckpointInfo, CheckpointTensors, Chosen]:
    from relight.manifest.foreign.exporting import choose_keys
    from relight.manifest.tensors import CheckpointTensors

    if parts and keys:
        raise ConfigError(
            "--parts and --keys exclude each other; a pattern such as 'model/*' names a part too"
        )
    catalog, inventory = open_run(url)
    info = choose_step(inventory, url, step)
    stored = CheckpointTensors(catalog, info.step, info.generation, rank)
    chosen = choose_keys(stored.keys(), stored.aliases, parts=parts or ("model",), patterns=keys or ())
    return info, stored, chosen


def _describe(
    info: CheckpointInfo, stored: CheckpointTensors, chosen: Chosen, tensors: Sequence[Tensor], *, kind: str
) -> dict[str, Any]:
    keys = sorted(chosen.keys.values())
    return {
        "step": info.step,
        "generation": info.generation,
        "format": kind,
        "tensors": len(tensors),
        "bytes": sum(tensor.num_bytes for tensor in tensors),
        "per_rank": [key for key in keys if info.world_size > 1 and stored.is_per_rank(key)],
        "replicas_differ": [key for key in keys if key in info.replicas_differ],
        "as_pairs": [one.name for one in tensors if one.dtype == "complex128" and kind in _WITHOUT_COMPLEX],
    }


def _cast(tensors: list[Tensor], dtype: str) -> dict[str, str]:
    """Replace the tensors that are cast; return the name and former dtype of each."""
    from relight.checkpoint.casting import cast_tensor

    cast: dict[str, str] = {}
    for at, tensor in enumerate(tensors):
        tensors[at] = cast_tensor(tensor, dtype)
        if tensors[at].dtype != tensor.dtype:
            cast[tensor.name] = tensor.dtype
    return cast


def _amount(tensors: Sequence[Tensor]) -> str:
    from relight.units import format_bytes

    return f"{len(tensors)} tensors, {format_bytes(sum(tensor.num_bytes for tensor in tensors))}"


def _warn_of(found: Mapping[str, Any], rank: int) -> None:
    remarks = {
        "per_rank": f"every rank has its own value, rank {rank}'s is exported",
        "replicas_differ": "replicas differed when it was saved",
        "as_pairs": "complex128 is written as pairs of F64",
    }
    for field, remark in remarks.items():
        if found[field]:
            warn(f"{remark}: {_listed(found[field])}")


def _warn_of_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    if skipped:
        listed = _listed([f"{name} ({reason})" for name, reason in skipped])
        warn(f"{len(skipped)} entries are no tensors and are left out: {listed}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
