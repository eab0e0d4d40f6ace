"""What is imported is what torch and safetensors had saved, bit for bit, and nothing of it is executed."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
saving = pytest.importorskip("safetensors.torch")

from relight.manifest.catalog import Catalog  # noqa: E402
from relight.manifest.foreign.opcodes import Call, Name, dumps, loads  # noqa: E402
from relight.manifest.index import ITEM_BYTES  # noqa: E402
from relight.manifest.tensors import CheckpointTensors  # noqa: E402
from relight.storage.local import LocalBackend  # noqa: E402
from tests.convert.ranks import save_shards, whole_tensors  # noqa: E402
from tests.convert.stored import noise  # noqa: E402
from tests.running import Home  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def made(seed: int, dtype: str, shape: tuple[int, ...]) -> Any:
    data = noise(seed, dtype, shape)[2]
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) if data else torch.empty(0)
    return (
        flat.to(getattr(torch, dtype)).reshape(shape)
        if data
        else flat.reshape(shape).to(getattr(torch, dtype))
    )


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def stored_at(root: Path, step: int = 0) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    stored = CheckpointTensors(Catalog(LocalBackend(root)), step, 1)
    found = {}
    for key in stored.keys():  # noqa: SIM118 - no mapping
        tensor = stored.tensor(key)
        data = bytearray(tensor.num_bytes)
        tensor.read(0, memoryview(data))
        found[key] = (tensor.dtype, tensor.shape, bytes(data))
    return found


def described(tensors: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        f"model/{name}": (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bits(tensor))
        for name, tensor in tensors.items()
    }


def all_dtypes() -> dict[str, Any]:
    return {
        f"{dtype}.{at}": made(at, dtype, shape)
        for dtype in ITEM_BYTES
        for at, shape in enumerate([(3, 5), (), (0, 2), (70,)])
    }


def test_safetensors_of_every_dtype(run: Any, tmp_path: Path) -> None:
    known = {
        name: one for name, one in all_dtypes().items() if "complex128" not in name and "fnuz" not in name
    }
    saving.save_file(known, tmp_path / "in.safetensors", metadata={"format": "pt"})
    code, said, err = run("import", "AT/in.safetensors", "AT/run", "--step", 7)
    assert (code, err, said["format"], said["step"], said["verified"]) == (0, "", "safetensors", 7, True)
    assert stored_at(tmp_path / "run", 7) == described(known)


@pytest.mark.parametrize("container", [dict, list])
def test_torch_files_of_every_dtype(run: Any, tmp_path: Path, container: type) -> None:
    tensors = all_dtypes()
    torch.save(tensors if container is dict else list(tensors.values()), tmp_path / "in.pt")
    code, said, err = run("import", "AT/in.pt", "AT/run")
    assert (code, err, said["format"], said["tensors"]) == (0, "", "torch", len(tensors))
    named = tensors if container is dict else {str(at): one for at, one in enumerate(tensors.values())}
    assert stored_at(tmp_path / "run") == described(named)


def test_dcp_of_every_dtype(run: Any, tmp_path: Path) -> None:
    tensors = all_dtypes()
    dcp.save(tensors, checkpoint_id=tmp_path / "in", no_dist=True)
    code, said, err = run("import", "AT/in", "AT/run")
    assert (code, err, said["format"], said["skipped"]) == (0, "", "dcp", [])
    assert stored_at(tmp_path / "run") == described(tensors)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp", "hf"])
def test_there_and_back_every_dtype(run: Any, tmp_path: Path, kind: str) -> None:
    torch.save(all_dtypes(), tmp_path / "in.pt")
    assert run("import", "AT/in.pt", "AT/run")[0] == 0
    assert run("export", "AT/run", "AT/out", "--format", kind, "--shard-size", "1 kB")[0] == 0
    code, said, _ = run("import", "AT/out", "AT/back")
    assert (code, said["format"]) == (0, kind)
    assert stored_at(tmp_path / "back") == described(all_dtypes())
    assert run("verify", "AT/back")[0] == 0
    assert run("ls", "AT/back")[1][0]["verified"] is True


def test_views_of_any_stride_are_read_in_row_major_order(run: Any, tmp_path: Path) -> None:
    base = made(1, "int32", (24, 50))
    tensors = {
        "transposed": base.t(),
        "columns": base[:, 3:7],
        "steps": base[::2, ::3],
        "offset": base[5:9],
        "expanded": base[:1, :4].expand(6, 4),
        "repeated": base[0, 0].expand(3, 5),
        "channels": made(2, "float16", (2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "complex": made(3, "complex128", (6, 7)).t(),
        "scalar": base[2, 2],
    }
    torch.save(tensors, tmp_path / "in.pt")
    assert run("import", "AT/in.pt", "AT/run")[0] == 0
    assert stored_at(tmp_path / "run") == described(tensors)
    dcp.save(tensors, checkpoint_id=tmp_path / "in", no_dist=True)
    assert run("import", "AT/in", "AT/other")[0] == 0
    assert stored_at(tmp_path / "other") == described(tensors)


def test_a_large_transposed_tensor_is_read_across_blocks(run: Any, tmp_path: Path) -> None:
    large = torch.arange(5_000_000, dtype=torch.int32).reshape(1000, 5000).t()
    torch.save({"w": large}, tmp_path / "in.pt")
    assert run("import", "AT/in.pt", "AT/run")[0] == 0
    dtype, shape, data = stored_at(tmp_path / "run")["model/w"]
    assert (dtype, shape) == ("int32", (5000, 1000))
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.int32).reshape(shape), large)


def test_a_model_among_other_things_is_the_model_and_the_rest_is_extra(run: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "mean": torch.ones(2),
    }
    torch.save(saved, tmp_path / "in.pt")
    code, said, _ = run("import", "AT/in.pt", "AT/run")
    assert code == 0
    assert sorted(stored_at(tmp_path / "run")) == [
        "extra.mean/value",
        *(
            f"extra.optimizer/state.{at}.{name}"
            for at in range(2)
            for name in ("exp_avg", "exp_avg_sq", "step")
        ),
        "model/bias",
        "model/weight",
    ]
    skipped = {one["name"]: one["reason"] for one in said["skipped"]}
    assert skipped["epoch"] == "no tensor but int 3"
    assert "optimizer.param_groups.0.lr" in skipped


def test_nested_dcp_is_named_as_torch_nested_it_and_byte_items_are_named(run: Any, tmp_path: Path) -> None:
    saved = {
        "model": {"a.w": made(1, "float32", (3,))},
        "optimizer": {"state": {"a.w": {"exp_avg": made(2, "float32", (3,))}}},
        "epoch": 3,
        "note": {"tensors": "none"},
    }
    dcp.save(saved, checkpoint_id=tmp_path / "in", no_dist=True)
    code, said, err = run("import", "AT/in", "AT/run")
    assert (code, err) == (0, "")
    assert sorted(stored_at(tmp_path / "run")) == ["extra.optimizer/state.a.w.exp_avg", "model/a.w"]
    assert {one["name"]: one["reason"] for one in said["skipped"]} == {
        "epoch": "no tensor but int 3",
        "note.tensors": "no tensor but str 'none'",
    }


@pytest.mark.multiprocess
def test_dcp_shards_of_several_ranks_are_put_together(home: Home, run: Any, tmp_path: Path) -> None:
    home.live(save_shards, world_size=2, path=str(tmp_path / "in"))
    code, said, _ = run("import", "AT/in", "AT/run")
    assert (code, said["format"], said["skipped"]) == (0, "dcp", [])
    assert stored_at(tmp_path / "run") == described(whole_tensors())


@pytest.fixture
def in_boxes(tmp_path: Path) -> Any:
    """Return the metadata of a checkpoint whose tensor w has two boxes, and a function that writes it changed."""
    whole = made(4, "bfloat16", (7, 6))
    dcp.save({"a": whole[:4].clone(), "b": whole[4:].clone()}, checkpoint_id=tmp_path / "in", no_dist=True)
    path = tmp_path / "in" / ".metadata"
    metadata = loads(path.read_bytes(), path="in")
    items = metadata.state["state_dict_metadata"]
    upper, lower = items.pop("a").state, items.pop("b").state
    lower["chunks"][0].state["offsets"] = (4, 0)
    upper |= {"size": (7, 6), "chunks": upper["chunks"] + lower["chunks"]}
    items["w"] = Call(
        Name("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"), (), upper, is_new=True
    )
    for index in metadata.state["storage_data"]:
        index.state["offset"] = (0, 0) if index.state["fqn"] == "a" else (4, 0)
        index.state["fqn"] = "w"
    return metadata, lambda: path.write_bytes(dumps(metadata)), whole


def test_dcp_boxes_are_put_together(in_boxes: Any, run: Any, tmp_path: Path) -> None:
    _, write, whole = in_boxes
    write()
    assert run("import", "AT/in", "AT/run")[0] == 0
    assert stored_at(tmp_path / "run") == described({"w": whole})


@pytest.mark.parametrize("change", ["missing", "twice", "outside"])
def test_dcp_boxes_that_do_not_cover_their_tensor_once_are_refused(
    in_boxes: Any, run: Any, tmp_path: Path, change: str
) -> None:
    metadata, write, _ = in_boxes
    chunks = metadata.state["state_dict_metadata"]["w"].state["chunks"]
    match change:
        case "missing":
            del chunks[1]
        case "twice":
            chunks[1] = chunks[0]
        case "outside":
            chunks[1].state["offsets"] = (5, 0)
    write()
    code, _, err = run("import", "AT/in", "AT/run")
    assert (code, "boxes of 'w' do not cover [7, 6] once" in err) == (1, True)
    assert not (tmp_path / "run").exists()


def test_a_dcp_box_of_another_dtype_or_shape_than_its_metadata_says_is_refused(
    in_boxes: Any, run: Any, tmp_path: Path
) -> None:
    metadata, write, _ = in_boxes
    infos = metadata.state["storage_data"]
    first, second = infos
    infos[first], infos[second] = infos[second], infos[first]
    write()
    code, _, err = run("import", "AT/in", "AT/run")
    assert (code, "does not hold bfloat16 of" in err) == (1, True)


def test_tied_tensors_stay_tied(run: Any, tmp_path: Path) -> None:
    weight = made(1, "float32", (4, 4))
    torch.save({"embed": weight, "head": weight, "half": weight[:2]}, tmp_path / "in.pt")
    code, said, _ = run("import", "AT/in.pt", "AT/run")
    assert (code, said["aliases"]) == (0, {"model/head": "model/embed"})
    assert stored_at(tmp_path / "run") == described({"embed": weight, "half": weight[:2]})
    for kind in ("safetensors", "torch", "dcp", "hf"):
        run("export", "AT/run", f"AT/{kind}", "--format", kind)
        assert run("import", f"AT/{kind}", f"AT/run-{kind}")[1]["aliases"] == {"model/head": "model/embed"}


@pytest.mark.multiprocess
def test_a_checkpointer_restores_the_model_from_an_import(home: Home, run: Any, tmp_path: Path) -> None:
    import relight

    def model() -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5))
        net[2].weight = torch.nn.Parameter(torch.randn(5, 4))
        net.add_module("tied", torch.nn.Linear(4, 5))
        net.tied.weight = net[2].weight
        return net

    saved, live = model(), model()
    torch.save(saved.state_dict(), tmp_path / "in.pt")
    assert run("import", "AT/in.pt", "AT/imported")[0] == 0
    state = relight.TrainState(model=live)
    with relight.Checkpointer(home.root(), state) as checkpointer:
        checkpointer.restore(source=str(tmp_path / "imported"), parts=("model",))
    assert all(map(torch.equal, saved.state_dict().values(), live.state_dict().values()))


class Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_code_in_a_source_is_never_run(run: Any, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    evil = Evil(f"touch {trace}")
    torch.save({"w": torch.ones(2), "evil": evil}, tmp_path / "in.pt")
    code, said, _ = run("import", "AT/in.pt", "AT/a")
    assert (code, said["skipped"]) == (0, [{"name": "evil", "reason": "no tensor but a posix.system object"}])
    dcp.save({"w": torch.ones(2), "evil": evil}, checkpoint_id=tmp_path / "in", no_dist=True)
    code, said, _ = run("import", "AT/in", "AT/b")
    assert (code, [one["name"] for one in said["skipped"]]) == (0, ["evil"])
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(evil))
    code, _, err = run("import", "AT/in", "AT/c")
    assert (code, "is not what torch.distributed.checkpoint writes" in err) == (1, True)
    assert not trace.exists()


def test_metadata_that_points_outside_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 100)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "in", no_dist=True)
    metadata = (tmp_path / "in" / ".metadata").read_bytes()
    changed = metadata.replace(b"\x8c\x0b__0_0.distcp", b"\x8c\x0b../secret.pt")
    if changed == metadata:
        changed = metadata.replace(b"__0_0.distcp", b"../secret.pt")
    assert changed != metadata
    (tmp_path / "in" / ".metadata").write_bytes(changed)
    code, _, err = run("import", "AT/in", "AT/run")
    assert (code, "is not a name below" in err) == (2, True)


def test_a_flipped_byte_of_a_torch_archive_is_found(run: Any, tmp_path: Path) -> None:
    torch.save({"w": made(1, "float32", (1000,))}, tmp_path / "in.pt")
    data = bytearray((tmp_path / "in.pt").read_bytes())
    at = data.index(bits(made(1, "float32", (1000,)))) + 500
    data[at] ^= 1
    (tmp_path / "in.pt").write_bytes(data)
    code, _, err = run("import", "AT/in.pt", "AT/run")
    assert (code, "tensor 'w' differs from its CRC-32" in err, "--ignore-crc" in err) == (1, True, True)
    assert not list((tmp_path / "run").glob("*"))
    assert run("import", "AT/in.pt", "AT/run", "--ignore-crc")[0] == 0


def test_cut_sources_are_found_before_anything_is_written(run: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "in.pt")
    saving.save_file({"w": torch.ones(1000)}, tmp_path / "in.safetensors")
    for name in ("in.pt", "in.safetensors"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-7])
        code, _, err = run("import", f"AT/{name}", "AT/run")
        assert (code, name in err) == (1, True)
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "in", no_dist=True)
    (tmp_path / "in" / "__0_0.distcp").unlink()
    code, _, err = run("import", "AT/in", "AT/run")
    assert (code, "__0_0.distcp is not there, but .metadata names it" in err) == (2, True)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_stored_is_refused_by_name(run: Any, tmp_path: Path) -> None:
    torch.save({"sparse": torch.eye(3).to_sparse()}, tmp_path / "in.pt")
    code, _, err = run("import", "AT/in.pt", "AT/run")
    assert (code, "'sparse' is made by torch._utils._rebuild_sparse_tensor" in err) == (2, True)
    torch.save({"conj": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "in.pt")
    code, _, err = run("import", "AT/in.pt", "AT/run")
    assert (code, "'conj' is a lazy view" in err) == (2, True)
    torch.save([1, "no tensor"], tmp_path / "in.pt")
    code, _, err = run("import", "AT/in.pt", "AT/run")
    assert (code, "no tensor in it" in err) == (2, True)
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt", _use_new_zipfile_serialization=False)
    code, _, err = run("import", "AT/in.pt", "AT/run")
    assert (code, "before 1.6" in err) == (2, True)
    assert not (tmp_path / "run").exists()


def test_shards_and_their_index_must_agree(run: Any, tmp_path: Path) -> None:
    torch.save({f"w{at}": torch.ones(300) for at in range(3)}, tmp_path / "in.pt")
    run("import", "AT/in.pt", "AT/a")
    run("export", "AT/a", "AT/hf", "--shard-size", "2 kB")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    whole = index.read_text()
    assert run("import", index, "AT/b")[0] == 0
    index.write_text(whole.replace('"w1"', '"w9"'))
    code, _, err = run("import", "AT/hf", "AT/c")
    assert (code, "the index says that" in err) == (1, True)
    index.write_text(whole)
    (tmp_path / "hf" / "model-00002-of-00003.safetensors").unlink()
    code, _, err = run("import", "AT/hf", "AT/c")
    assert (code, "model-00002-of-00003.safetensors" in err) == (2, True)


def test_relights_own_images_are_safetensors_too(run: Any, tmp_path: Path) -> None:
    torch.save(all_dtypes(), tmp_path / "in.pt")
    run("import", "AT/in.pt", "AT/a")
    image = next((tmp_path / "a").glob("*/rank-00000.safetensors"))
    assert run("import", image, "AT/b")[0] == 0
    known = {key: value for key, value in stored_at(tmp_path / "a").items() if value[0] != "complex128"}
    found = stored_at(tmp_path / "b")
    assert {key: found[key] for key in known} == known


def test_a_torch_file_with_strange_members_is_refused(run: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "program.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"")
        archive.writestr("a/constants.pkl", b"")
    code, _, err = run("import", "AT/program.pt", "AT/run")
    assert (code, "TorchScript" in err) == (2, True)
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("a/b", b"")
    code, _, err = run("import", "AT/other.pt", "AT/run")
    assert (code, "holds no data.pkl" in err) == (1, True)
