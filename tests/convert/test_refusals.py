"""Sources that are broken, foreign or hostile, and disks that lie: an error that names what, and nothing is left."""

from __future__ import annotations

import errno
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relight.errors import ConfigError, CorruptionError, MissingCopyError, StopError, UnknownFormatError
from relight.manifest.assembly import Tensor
from relight.manifest.catalog import Catalog
from relight.manifest.foreign.exporting import export_tensors
from relight.manifest.foreign.importing import import_source
from relight.manifest.foreign.opcodes import Call, Name, Reference, dumps
from relight.manifest.foreign.opening import open_source
from relight.manifest.foreign.source import Found, Source, key_of, keys_of, name_of
from relight.manifest.foreign.staging import Output, Stage, _exchange
from relight.manifest.foreign.strided import StridedView, is_contiguous
from relight.manifest.manifest import digest_block
from relight.manifest.names import image_name
from relight.manifest.tensors import CheckpointTensors
from relight.storage.local import LocalBackend
from relight.testing.files import FailingFiles, LayeredFiles, UnsyncedFiles
from tests.convert.stored import noise, store

DCP = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


def size(*sizes: int) -> Call:
    return Call(Name("torch", "Size"), (sizes,))


def storage(key: str = "0", cls: str = "FloatStorage", numel: int = 6) -> Reference:
    return Reference(("storage", Name("torch", cls), key, "cpu", numel))


def rebuilt(*args: Any, name: str = "_rebuild_tensor_v2") -> Call:
    usual = (storage(), 0, (2, 3), (3, 1), False, Call(Name("collections", "OrderedDict"), ()))
    return Call(Name("torch._utils", name), (*args, *usual[len(args) :]))


def archive(
    path: Path,
    content: Any,
    *,
    data: bytes = bytes(24),
    order: bytes = b"little",
    compress: int = zipfile.ZIP_STORED,
) -> Path:
    """Write a file of torch.save by hand."""
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("archive/data.pkl", dumps(content))
        opened.writestr("archive/byteorder", order)
        opened.writestr("archive/data/0", data, compress_type=compress)
    return path


def reads(tensor: Tensor) -> bytes:
    found = bytearray(tensor.num_bytes)
    tensor.read(0, memoryview(found))
    return bytes(found)


# torch


@pytest.mark.parametrize(
    "content",
    [
        rebuilt(name="_rebuild_tensor"),
        rebuilt(storage(), 0, size(2, 3), [3, 1]),
        Call(Name("torch._utils", "_rebuild_parameter"), (rebuilt(), True, None)),
        Call(Name("torch._utils", "_rebuild_parameter_with_state"), (rebuilt(), True, None, {})),
        Call(Name("torch.nn.parameter", "Parameter"), (rebuilt(), True), is_new=True),
        Call(
            Name("torch._tensor", "_rebuild_from_type_v2"),
            (
                Name("torch._utils", "_rebuild_tensor_v2"),
                Name("torch", "Tensor"),
                rebuilt().args,
                {"note": 1},
            ),
        ),
    ],
)
def test_every_form_of_a_plain_tensor_is_read(tmp_path: Path, content: Any) -> None:
    source = open_source(str(archive(tmp_path / "in.pt", {"w": content}, data=bytes(range(24)))))
    [found] = source.tensors
    assert (found.path, found.tensor.dtype, found.tensor.shape) == (("w",), "float32", (2, 3))
    assert reads(found.tensor) == bytes(range(24))


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else rebuilt()


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (rebuilt(storage(cls="QInt8Storage")), UnknownFormatError, "of a form that relight does not know"),
        (rebuilt("no storage"), UnknownFormatError, "of a form"),
        (rebuilt(storage(), 0, 7), UnknownFormatError, "of a form"),
        (rebuilt(storage(), -1), CorruptionError, "sizes that cannot be"),
        (rebuilt(storage(), 0, (2, -3)), CorruptionError, "sizes that cannot be"),
        (rebuilt(storage(), 0, (2, 3), (3,)), CorruptionError, "sizes that cannot be"),
        (rebuilt(storage(), 1), CorruptionError, "has 24 bytes, 28 are needed"),
        (rebuilt(storage(), 0, (3, 3)), CorruptionError, "has 24 bytes, 36 are needed"),
        (rebuilt(storage("7")), CorruptionError, "holds no data/7"),
        (
            Call(
                Name("torch._utils", "_rebuild_tensor_v3"),
                (storage(cls="UntypedStorage"), 0, (3,), (1,), False, None, Name("torch", "bits16")),
            ),
            UnknownFormatError,
            "of dtype bits16",
        ),
        (
            Call(
                Name("torch._tensor", "_rebuild_from_type_v2"),
                (Name("torch._utils", "_rebuild_tensor_v2"), Name("their", "Tensor"), rebuilt().args, {}),
            ),
            UnknownFormatError,
            "'w' is a their.Tensor",
        ),
        (Call(Name("torch._utils", "_rebuild_qtensor"), ()), UnknownFormatError, "_rebuild_qtensor"),
        (nested(70), UnknownFormatError, "more than 64 deep"),
    ],
)
def test_what_cannot_be_a_plain_tensor_is_refused(
    tmp_path: Path, content: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_source(str(archive(tmp_path / "in.pt", {"w": content})))


def test_archives_that_are_not_whole_or_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(CorruptionError, match="not a whole archive"):
        open_source(str(path))
    archive(path, {"w": rebuilt()}, order=b"big")
    with pytest.raises(UnknownFormatError, match="byte order b'big'"):
        open_source(str(path))
    with pytest.raises(CorruptionError, match="bytes, 24 are needed"):
        open_source(str(archive(path, {"w": rebuilt()}, compress=zipfile.ZIP_DEFLATED)))
    archive(path, {"w": rebuilt()})
    data = bytearray(path.read_bytes())
    last = data.rindex(b"PK\x01\x02")
    data[last + 42 : last + 46] = struct.pack("<I", 3)
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="archive/data/0 lies outside the archive"):
        open_source(str(path))


def test_a_pickle_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.manifest.foreign.torch_archive._MAX_PICKLE_BYTES", 10)
    with pytest.raises(CorruptionError, match=r"data\.pkl is too large"):
        open_source(str(archive(tmp_path / "in.pt", {"w": rebuilt()})))


def test_a_storage_read_out_of_order_is_not_compared_but_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "in.pt", rebuilt(), data=bytes(range(24)))
    path.write_bytes(path.read_bytes().replace(bytes(range(24)), bytes(24)))
    [found] = open_source(str(path)).tensors
    assert found.path == ("value",)
    part = memoryview(bytearray(8))
    found.tensor.read(8, part)
    assert part == bytes(8)
    with pytest.raises(CorruptionError, match="CRC-32"):
        reads(found.tensor)


# strided views


def test_strided_views_need_a_file_of_this_machine_that_stays_as_long_as_it_was(tmp_path: Path) -> None:
    class Remote:
        url = "s3://bucket"

    def view(backend: Any, name: str) -> StridedView:
        return StridedView(
            backend=backend, name=name, base_bytes=8, item_bytes=4, shape=(2, 3), strides=(1, 2)
        )

    target = memoryview(bytearray(24))
    with pytest.raises(UnknownFormatError, match="copy it to this machine first"):
        view(Remote(), "x").read(0, target)
    with pytest.raises(MissingCopyError):
        view(LocalBackend(tmp_path), "x").read(0, target)
    (tmp_path / "x").write_bytes(bytes(31))
    with pytest.raises(CorruptionError, match="fewer than 32 bytes"):
        view(LocalBackend(tmp_path), "x").read(0, target)


def test_only_row_major_order_without_gaps_is_contiguous() -> None:
    assert is_contiguous((), ())
    assert is_contiguous((3, 1, 2), (2, 99, 1))
    assert not is_contiguous((3, 2), (3, 1))
    assert not is_contiguous((3, 2), (1, 3))


# DCP


def dcp_folder(folder: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
    """Write a checkpoint with a tensor w and a byte item note, after `change` of what .metadata says."""
    folder.mkdir()
    archive(folder / "tensor.distcp", rebuilt(), data=bytes(range(24)))
    archive(folder / "note.distcp", {"mean": rebuilt(), "epoch": 3})
    properties = Call(Name(DCP, "TensorProperties"), (), (Name("torch", "float32"),), is_new=True)
    chunk = Call(
        Name(DCP, "ChunkStorageMetadata"), (), {"offsets": size(0, 0), "sizes": size(2, 3)}, is_new=True
    )
    described = {"properties": properties, "size": size(2, 3), "chunks": [chunk]}

    def index(fqn: str, offset: Any) -> Call:
        return Call(Name(DCP, "MetadataIndex"), (), {"fqn": fqn, "offset": offset}, is_new=True)

    def info(name: str) -> Call:
        place = {"relative_path": name, "offset": 0, "length": (folder / name).stat().st_size}
        return Call(Name(FILES, "_StorageInfo"), (), place, is_new=True)

    state = {
        "state_dict_metadata": {
            "w": Call(Name(DCP, "TensorStorageMetadata"), (), described, is_new=True),
            "note": Call(Name(DCP, "BytesStorageMetadata"), (), is_new=True),
        },
        "planner_data": None,
        "storage_data": {
            index("w", size(0, 0)): info("tensor.distcp"),
            index("note", None): info("note.distcp"),
        },
    }
    change(state)
    (folder / ".metadata").write_bytes(dumps(Call(Name(DCP, "Metadata"), (), state, is_new=True)))
    return folder


def test_tensors_in_byte_items_are_read_and_the_rest_is_named(tmp_path: Path) -> None:
    source = open_source(str(dcp_folder(tmp_path / "in")))
    assert [(found.path, found.tensor.num_bytes) for found in source.tensors] == [
        (("w",), 24),
        (("note", "mean"), 24),
    ]
    assert source.skipped == [("note.epoch", "no tensor but int 3")]


def of(state: dict[str, Any], name: str) -> dict[str, Any]:
    return state["state_dict_metadata"][name].state  # type: ignore[no-any-return]


def infos(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [info.state for info in state["storage_data"].values()]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda s: s.pop("storage_data"), CorruptionError, "is not what torch.distributed.checkpoint writes"),
        (lambda s: s["state_dict_metadata"].update(w=3), CorruptionError, "int where an object should be"),
        (
            lambda s: s["state_dict_metadata"].update(w=Call(Name("a", "b"), ())),
            UnknownFormatError,
            "is a a.b",
        ),
        (lambda s: of(s, "w").pop("size"), CorruptionError, "the description of 'w'"),
        (
            lambda s: of(s, "w").update(
                properties=Call(Name(DCP, "TensorProperties"), (), (Name("t", "bits"),))
            ),
            UnknownFormatError,
            "'w' has dtype bits",
        ),
        (
            lambda s: [index.state.update(fqn="v") for index in s["storage_data"]],
            CorruptionError,
            "does not say where all boxes of 'w' are",
        ),
        (lambda s: infos(s)[0].update(transform_descriptors=["zstd"]), UnknownFormatError, "transformed by"),
        (lambda s: infos(s)[0].update(offset=-1), CorruptionError, "the place of 'w' cannot be"),
        (lambda s: infos(s)[0].update(length=10**6), CorruptionError, "ends at byte"),
        (lambda s: infos(s)[0].update(relative_path="gone"), MissingCopyError, "gone is not there"),
    ],
)
def test_metadata_that_cannot_be_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        reads(open_source(str(dcp_folder(tmp_path / "in", change))).tensors[0].tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: infos(s)[1].update(transform_descriptors=["zstd"]), "transformed"),
        (lambda s: s["storage_data"].popitem(), "does not say where 'note' at None is"),
    ],
)
def test_byte_items_that_cannot_be_loaded_are_skipped_and_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    [(name, reason)] = open_source(str(dcp_folder(tmp_path / "in", change))).skipped
    assert (name, "cannot be loaded as weights" in reason, message in reason) == ("note", True, True)


# safetensors


def tensors_file(path: Path, header: dict[str, Any], data: bytes = bytes(8)) -> Path:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


@pytest.mark.parametrize(
    ("entry", "kind", "message"),
    [
        (
            {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]},
            UnknownFormatError,
            "has dtype F4; known: F64",
        ),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, CorruptionError, "cannot have 8 bytes"),
        ({"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}, CorruptionError, "cannot have 8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}, CorruptionError, "lies outside the file"),
        ({"dtype": "F32"}, CorruptionError, "header cannot be read"),
    ],
)
def test_safetensors_that_cannot_be_are_refused(
    tmp_path: Path, entry: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_source(str(tensors_file(tmp_path / "in.safetensors", {"w": entry})))


ENTRY = {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}


def test_notes_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    notes = {"relight.complex128": "no list", "format": "pt"}
    source = open_source(str(tensors_file(tmp_path / "in.safetensors", {"w": ENTRY, "__metadata__": notes})))
    assert [(one.path, one.tensor.dtype) for one in source.tensors] == [(("w",), "float64")]
    assert source.aliases == {}


def test_shards_that_contradict_their_index_are_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    tensors_file(tmp_path / "a.safetensors", {"w": ENTRY})
    tensors_file(tmp_path / "b.safetensors", {"w": ENTRY})
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    with pytest.raises(CorruptionError, match=r"'w' is in a\.safetensors and in b\.safetensors"):
        open_source(str(tmp_path))
    tensors_file(tmp_path / "b.safetensors", {"v": ENTRY, "x": ENTRY | {"data_offsets": [8, 16]}}, bytes(16))
    with pytest.raises(CorruptionError, match=r"b\.safetensors holds 'x', which the index does not name"):
        open_source(str(tmp_path))
    index.write_text("{}")
    with pytest.raises(CorruptionError, match="is no index of safetensors files"):
        open_source(str(index))


def test_a_source_that_is_not_there_or_not_clear_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingCopyError, match="x is not there"):
        open_source(str(tmp_path / "x"))
    with pytest.raises(UnknownFormatError, match=r"neither \.metadata"):
        open_source(str(tmp_path))
    for name in ("a.safetensors", "b.safetensors"):
        tensors_file(tmp_path / name, {"w": ENTRY})
    with pytest.raises(ConfigError, match=r"holds several: a\.safetensors, b\.safetensors"):
        open_source(str(tmp_path))
    with pytest.raises(ConfigError, match="is of format safetensors, not torch"):
        open_source(str(tmp_path / "a.safetensors"), "torch")
    (tmp_path / "c").write_bytes(b"\0\1")
    with pytest.raises(UnknownFormatError, match="no safetensors file and no archive"):
        open_source(str(tmp_path / "c"))
    with pytest.raises(CorruptionError):
        open_source(str(tmp_path / "c"), "safetensors")


# names


def test_names_and_keys_are_each_others_inverse() -> None:
    for key in ("model/a.b", "optimizer/a.b/exp_avg", "model.gen/a", "extra.ema/a", "model/a/b"):
        assert key_of(name_of(key)) == key
    assert key_of("modeling/x") == "model/modeling/x"


def test_paths_that_would_get_one_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.b and a\.b would both become 'model/a\.b'"):
        keys_of([("a", "b"), ("a.b",)])


# disks and neighbours


class ChangingFiles(LayeredFiles):
    """Writes `new` where it should write `old`."""

    def __init__(self, old: bytes, new: bytes) -> None:
        super().__init__(UnsyncedFiles())
        self._old, self._new = old, new

    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
        changed = bytes(data).replace(self._old, self._new, 1)
        return super().write(descriptor, memoryview(changed), offset_bytes)


def one_tensor(data: bytes = b"content!") -> Tensor:
    def read(start: int, target: memoryview) -> None:
        target[:] = data[start : start + target.nbytes]

    return Tensor(name="w", dtype="uint8", shape=(len(data),), num_bytes=len(data), read=read)


@pytest.mark.parametrize("kind", ["safetensors", "hf"])
def test_a_disk_that_stores_something_else_is_found_before_the_target_exists(
    tmp_path: Path, kind: Any
) -> None:
    for old, new, message in (
        (b"content", b"contend", "'w' read back differs"),
        (b'"w"', b'"v"', "names differ: v, w"),
    ):
        with pytest.raises(CorruptionError, match=message):
            export_tensors(
                str(tmp_path / "out"), kind, [one_tensor()], {}, shard_bytes=99, files=ChangingFiles(old, new)
            )
        assert list(tmp_path.iterdir()) == []


def test_an_import_that_reads_back_wrong_is_removed(tmp_path: Path) -> None:
    source = Source(format="torch", tensors=[Found(path=("w",), tensor=one_tensor())])
    catalog = Catalog(LocalBackend(tmp_path / "run", ChangingFiles(b"content", b"contend")))
    with pytest.raises(CorruptionError, match=r"read back, .* block 0 .*differs from its digest"):
        import_source(source, catalog)
    assert catalog.committed() == []
    assert catalog.incomplete() == []


def test_another_process_at_the_same_root_stops_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(format="torch", tensors=[Found(path=("w",), tensor=one_tensor())])
    catalog = Catalog(LocalBackend(tmp_path / "a", UnsyncedFiles()))
    with pytest.raises(StopError, match="another process has begun a generation here"):
        import_source(source, catalog, advance=lambda _: catalog.claim(None) and None)
    other = Catalog(LocalBackend(tmp_path / "b", UnsyncedFiles()))
    theirs = image_name(0, 1, 0)
    with pytest.raises(StopError, match="is there already"):
        import_source(source, other, advance=lambda _: other.backend.put(theirs, b"theirs") and None)
    assert other.backend.get(theirs) == b"theirs"
    lost = Catalog(LocalBackend(tmp_path / "c", UnsyncedFiles()))
    monkeypatch.setattr(Catalog, "commit", lambda *_: None)
    with pytest.raises(StopError, match="was stored but is not there"):
        import_source(source, lost)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "in.pt", {"w\udc80": rebuilt()})
    with pytest.raises(UnknownFormatError, match="names must be valid Unicode"):
        import_source(open_source(str(path)), Catalog(LocalBackend(tmp_path / "run")))


def test_two_exports_to_one_target_do_not_disturb_each_other(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Stage(str(target), is_folder=True) as first, Stage(str(target), is_folder=True) as second:
        for number, stage in enumerate((first, second)):
            with stage.output(str(number)) as output:
                output.write(b"x")
        first.publish()
        with pytest.raises(ConfigError, match="is there already"):
            second.publish()
    assert [path.name for path in target.iterdir()] == ["0"]
    assert list(tmp_path.iterdir()) == [target]


class OnlyRename(FailingFiles):
    """A file system without links, or one on which the target appears at the last moment."""

    def __init__(self, code: int) -> None:
        super().__init__(-1, inner=UnsyncedFiles())
        self.link_code = code

    def link(self, source: Path, target: Path) -> None:
        raise OSError(self.link_code, "no link")


def test_a_file_system_without_links_gets_its_file_all_the_same(tmp_path: Path) -> None:
    target = str(tmp_path / "out.safetensors")
    with pytest.raises(ConfigError, match="is there already"):
        export_tensors(
            target, "safetensors", [one_tensor()], {}, shard_bytes=9, files=OnlyRename(errno.EEXIST)
        )
    export_tensors(target, "safetensors", [one_tensor()], {}, shard_bytes=9, files=OnlyRename(errno.EPERM))
    assert [reads(one.tensor) for one in open_source(target).tensors] == [b"content!"]


class Stuck(LayeredFiles):
    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
        return 0


def test_a_file_system_that_takes_nothing_and_one_that_cannot_lock_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relight.errors import StorageUnavailableError

    target = str(tmp_path / "out.pt")
    with pytest.raises(StorageUnavailableError, match="took no bytes"):
        export_tensors(target, "torch", [one_tensor()], {}, shard_bytes=9, files=Stuck())

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StorageUnavailableError, match="no locks"):
        export_tensors(target, "torch", [one_tensor()], {}, shard_bytes=9)
    assert list(tmp_path.iterdir()) == []


def test_an_output_may_be_closed_twice(tmp_path: Path) -> None:
    output = Output(UnsyncedFiles(), tmp_path / "x")
    output.close()
    output.close()
    assert output.closed


def test_a_directory_that_cannot_be_replaced_in_one_step_stays(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot replace a directory in one step"):
        _exchange(tmp_path / "a", inner)
    with pytest.raises(FileNotFoundError):
        _exchange(tmp_path / "a", tmp_path / "c")


# what an export reads


def damaged(catalog: Catalog, old: bytes, new: bytes) -> None:
    """Change the manifest of step 1, digest included: what a wrong writer would have made."""
    path = Path(catalog.backend.url.removeprefix("file://")) / "step-000000000001.g0001" / "manifest.json"
    body = path.read_bytes().partition(b',"body":')[2][:-2]
    assert old in body
    body = body.replace(old, new, 1)
    path.write_bytes(b'{"digest":"' + digest_block(body).encode() + b'","body":' + body + b"}\n")


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        (b'["float32",[4,3]', b'["float23",[4,3]', UnknownFormatError, "has dtype float23"),
        (b'["float32",[4,3]', b'["float32",[4,4]', CorruptionError, "is not what the index says"),
        (b'"model/w":[', b'"model/v":[', CorruptionError, "holds no 'model/v'"),
        (
            b'["float32",[4,3],0,[]]',
            b'["float32",[4,3],-2,[]]',
            UnknownFormatError,
            "do not cover the tensor once",
        ),
    ],
)
def test_a_manifest_that_contradicts_the_images_is_found(
    catalog: Catalog, old: bytes, new: bytes, kind: type[Exception], message: str
) -> None:
    store(catalog, {"model/w": noise(1, "float32", (4, 3))})
    damaged(catalog, old, new)
    stored = CheckpointTensors(catalog, 1, 1)
    with pytest.raises(kind, match=message):
        stored.tensor(stored.keys()[0])


def test_a_dtype_that_a_rank_alone_knows_is_refused(catalog: Catalog) -> None:
    own = [{"model/x": ("float32", (2,), bytes(8))}]
    store(catalog, {"model/w": noise(1, "float32", (4, 3))}, own=own)
    stored = CheckpointTensors(catalog, 1, 1)
    stored._record(0).draft.local["model/x"] = ("float23", (2,))
    with pytest.raises(UnknownFormatError, match="model/x has dtype float23"):
        stored.tensor("model/x")
