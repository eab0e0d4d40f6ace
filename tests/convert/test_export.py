"""What is exported is what was stored, bit for bit, to the readers that the formats belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
safetensors = pytest.importorskip("safetensors")

from relight.cli import main  # noqa: E402
from relight.manifest.catalog import Catalog  # noqa: E402
from relight.manifest.index import ITEM_BYTES  # noqa: E402
from relight.manifest.shard import Layout  # noqa: E402
from tests.convert.ranks import save_run  # noqa: E402
from tests.convert.stored import Content, noise, store  # noqa: E402
from tests.running import Home  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# What the installed safetensors library hands out to torch; relight stores more.
FOREIGN = sorted(set(ITEM_BYTES) - {"complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"})
SHAPES = ((3, 5), (), (0, 2), (9,))


def all_dtypes() -> Content:
    return {
        f"model/{dtype}.{at}": noise(at, dtype, shape)
        for dtype in ITEM_BYTES
        for at, shape in enumerate(SHAPES)
    }


def bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def assert_equal(found: dict[str, Any], content: Content) -> None:
    assert found.keys() == {key.removeprefix("model/") for key in content}
    for key, (dtype, shape, data) in content.items():
        tensor = found[key.removeprefix("model/")]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
        assert bits(tensor) == data


def open_all(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safetensors.safe_open(path, "pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()  # noqa: SIM118


@pytest.mark.parametrize("kind", ["safetensors", "hf"])
def test_the_safetensors_library_reads_every_dtype_that_it_knows(
    catalog: Catalog, run: Any, tmp_path: Path, kind: str
) -> None:
    content = {key: value for key, value in all_dtypes().items() if value[0] in FOREIGN}
    store(catalog, content)
    target = "AT/out.safetensors" if kind == "safetensors" else "AT/out"
    code, said, err = run("export", "AT/run", target)
    assert (code, err, said["format"], said["verified"]) == (0, "", kind, True)
    path = tmp_path / "out.safetensors" if kind == "safetensors" else tmp_path / "out" / "model.safetensors"
    found, metadata = open_all(path)
    assert metadata == {"format": "pt"}
    assert_equal(found, content)


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_load_reads_every_dtype(catalog: Catalog, run: Any, tmp_path: Path, mapped: bool) -> None:
    store(catalog, all_dtypes())
    assert run("export", "AT/run", "AT/out.pt")[0] == 0
    assert_equal(torch.load(tmp_path / "out.pt", weights_only=True, mmap=mapped), all_dtypes())


def test_dcp_load_reads_every_dtype(catalog: Catalog, run: Any, tmp_path: Path) -> None:
    store(catalog, all_dtypes())
    assert run("export", "AT/run", "AT/out", "--format", "dcp", "--shard-size", "200 B")[0] == 0
    live = {
        key.removeprefix("model/"): torch.zeros(shape, dtype=getattr(torch, dtype))
        for key, (dtype, shape, _) in all_dtypes().items()
    }
    dcp.load(live, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_equal(live, all_dtypes())
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1


def test_every_archive_of_torch_has_true_checksums_and_aligned_storages(
    catalog: Catalog, run: Any, tmp_path: Path
) -> None:
    import zipfile

    store(catalog, all_dtypes())
    run("export", "AT/run", "AT/out.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as opened:
        assert opened.testzip() is None
        reader = torch._C.PyTorchFileReader(str(tmp_path / "out.pt"))
        starts = [reader.get_record_offset(f"data/{at}") for at in range(len(all_dtypes()))]
    assert [start % 64 for start in starts] == [0] * len(starts)


def test_shards_are_what_transformers_expects(catalog: Catalog, run: Any, tmp_path: Path) -> None:
    content = {f"model/layers.{at}.weight": noise(at, "bfloat16", (4, 100)) for at in range(7)}
    layout = Layout.on((2,), (0, 1), ((0, 1),))
    store(catalog, content, dict.fromkeys(content, layout), world_size=2)
    code, said, _ = run("export", "AT/run", "AT/out", "--shard-size", "2 kB")
    names = [f"model-0000{at}-of-00004.safetensors" for at in range(1, 5)]
    assert (code, [one["name"] for one in said["files"]]) == (0, [*names, "model.safetensors.index.json"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 7 * 800}
    found: dict[str, Any] = {}
    for name in names:
        tensors, _ = open_all(tmp_path / "out" / name)
        assert {index["weight_map"][key] for key in tensors} == {name}
        found |= tensors
    assert_equal(found, content)


@pytest.mark.multiprocess
def test_a_model_that_ranks_trained_in_shards_is_exported_whole(home: Home, run: Any, tmp_path: Path) -> None:
    home.live(save_run, world_size=2, root=home.root(), whole=str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert run("export", home.root(), "AT/out.safetensors")[0] == 0
    found = open_all(tmp_path / "out.safetensors")[0]
    assert {name: bits(one) for name, one in found.items()} == {
        name: bits(one) for name, one in whole.items()
    }


def test_tied_tensors_are_stored_once_and_noted(catalog: Catalog, run: Any, tmp_path: Path) -> None:
    content = {"model/embed": noise(1, "float32", (8, 4)), "model/w": noise(2, "float32", (3,))}
    store(catalog, content, aliases={"model/head": "model/embed"})
    for target, *options in (["AT/a.safetensors"], ["AT/b.pt"], ["AT/c", "--format", "dcp"], ["AT/d"]):
        code, said, _ = run("export", "AT/run", target, *options)
        assert (code, said["aliases"]) == (0, {"head": "embed"})
    found, metadata = open_all(tmp_path / "a.safetensors")
    assert_equal(found, content)
    assert metadata == {"format": "pt", "head": "embed"}
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()
    live = {name: torch.zeros(8, 4) for name in ("embed", "head")}
    dcp.load(live, checkpoint_id=tmp_path / "c", no_dist=True)
    assert bits(live["head"]) == bits(live["embed"]) == content["model/embed"][2]


def test_a_tied_name_that_alone_is_asked_for_gets_the_content(
    catalog: Catalog, run: Any, tmp_path: Path
) -> None:
    store(catalog, {"model/embed": noise(1, "float32", (8,))}, aliases={"model/head": "model/embed"})
    code, said, _ = run("export", "AT/run", "AT/out.safetensors", "--keys", "head")
    assert (code, said["aliases"]) == (0, {})
    assert list(open_all(tmp_path / "out.safetensors")[0]) == ["head"]
    code, said, _ = run("export", "AT/run", "AT/embed.safetensors", "--keys", "embed")
    assert (code, said["aliases"]) == (0, {})
    assert list(open_all(tmp_path / "embed.safetensors")[0]) == ["embed"]


def test_parts_and_patterns_choose_keys(catalog: Catalog, run: Any, tmp_path: Path) -> None:
    content = {
        "model/a.w": noise(1, "float32", (2,)),
        "model/b.w": noise(2, "float32", (2,)),
        "optimizer/a.w/exp_avg": noise(3, "float32", (2,)),
        "extra.ema/a.w": noise(4, "float32", (2,)),
    }
    store(catalog, content)

    def names(*options: str) -> list[str]:
        code, _, err = run("export", "AT/run", "AT/out.safetensors", "--force", *options)
        assert (code, err) == (0, "")
        return sorted(open_all(tmp_path / "out.safetensors")[0])

    assert names() == ["a.w", "b.w"]
    assert names("--parts", "optimizer") == ["optimizer/a.w/exp_avg"]
    assert names("--parts", "model", "--parts", "extra") == ["a.w", "b.w", "extra.ema/a.w"]
    assert names("--keys", "a.*") == ["a.w", "extra.ema/a.w", "optimizer/a.w/exp_avg"]
    assert names("--keys", "model/a.*", "--keys", "optimizer/*") == ["a.w", "optimizer/a.w/exp_avg"]
    code, _, err = run("export", "AT/run", "AT/other.pt", "--keys", "nothing*")
    assert (code, "no tensor of nothing*" in err) == (2, True)
    code, _, err = run("export", "AT/run", "AT/other.pt", "--keys", "a", "--parts", "model")
    assert (code, "exclude each other" in err) == (2, True)


def test_complex128_is_written_as_pairs_and_says_so_where_the_format_has_no_such_dtype(
    catalog: Catalog, run: Any, tmp_path: Path
) -> None:
    dtype, shape, data = noise(1, "complex128", (3, 2))
    store(catalog, {"model/c": (dtype, shape, data)})
    code, said, _ = run("export", "AT/run", "AT/out.safetensors")
    assert (code, said["as_pairs"]) == (0, ["c"])
    found, metadata = open_all(tmp_path / "out.safetensors")
    assert (found["c"].dtype, tuple(found["c"].shape), bits(found["c"])) == (torch.float64, (3, 2, 2), data)
    assert metadata["relight.complex128"] == '["c"]'
    assert run("export", "AT/run", "AT/out.pt")[1]["as_pairs"] == []


def test_each_ranks_own_value_is_exported_of_the_rank_that_is_chosen(
    catalog: Catalog, run: Any, tmp_path: Path
) -> None:
    own = [{"model/mean": noise(rank, "float32", (3,))} for rank in range(2)]
    store(catalog, {"model/w": noise(5, "float32", (4,))}, world_size=2, own=own)
    for rank in range(2):
        code, said, _ = run("export", "AT/run", f"AT/{rank}.pt", "--rank", rank)
        assert (code, said["per_rank"]) == (0, ["model/mean"])
        loaded = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert bits(loaded["mean"]) == own[rank]["model/mean"][2]


@pytest.mark.parametrize("to", ["float16", "bfloat16", "float64"])
def test_a_cast_is_torchs_own_and_is_listed(catalog: Catalog, run: Any, tmp_path: Path, to: str) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    values[:3] = torch.tensor([float("inf"), float("nan"), -0.0])
    content = {
        "model/w": ("float32", (1000,), bits(values)),
        "model/n": noise(2, "int32", (5,)),
    }
    store(catalog, content)
    code, said, _ = run("export", "AT/run", "AT/out.pt", "--dtype", to)
    assert (code, said["cast"]) == (0, {"w": "float32"})
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert bits(loaded["w"]) == bits(values.to(getattr(torch, to)))
    assert bits(loaded["n"]) == content["model/n"][2]


def test_a_cast_that_would_lose_a_value_is_refused(catalog: Catalog, run: Any, tmp_path: Path) -> None:
    store(catalog, {"model/w": ("float32", (2,), bits(torch.tensor([1.0, 1e6])))})
    code, _, err = run("export", "AT/run", "AT/out.pt", "--dtype", "float16")
    assert (code, "w: a value is too large for float16" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    code, _, err = run("export", "AT/run", "AT/out.pt", "--dtype", "int8")
    assert (code, "choose one of float64" in err) == (2, True)


def test_a_bad_block_stops_the_export_and_leaves_nothing(catalog: Catalog, run: Any, tmp_path: Path) -> None:
    store(catalog, {"model/w": noise(1, "float32", (1000,))})
    image = next((tmp_path / "run").glob("*/rank-00000.safetensors"))
    data = bytearray(image.read_bytes())
    data[-5] ^= 1
    image.write_bytes(data)
    for target, *options in (["AT/a.safetensors"], ["AT/b.pt"], ["AT/c", "--format", "dcp"], ["AT/d"]):
        code, _, err = run("export", "AT/run", target, *options)
        assert (code, "rank-00000.safetensors: block 0 differs from its digest" in err) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_in_words_it_says_what_was_done_and_warns_of_what_is_not_plain(
    catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [{f"model/mean{at}": noise(rank, "float32", (3,)) for at in range(6)} for rank in range(2)]
    store(catalog, {"model/c": noise(5, "complex128", (4,))}, world_size=2, own=own)
    assert (
        main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--rank", "1", "--dtype", "float64"])
        == 0
    )
    said = capsys.readouterr()
    assert said.out == (
        "exported step 1 of generation 1 as hf: 7 tensors, 208 B, files: 1; read back, equal; 6 cast to float64\n"
    )
    names = ", ".join(f"model/mean{at}" for at in range(5))
    assert said.err.splitlines() == [
        f"relight: warning: every rank has its own value, rank 1's is exported: {names} and 1 more",
        "relight: warning: complex128 is written as pairs of F64: c",
    ]
    torch.save({"w": torch.ones(2), "epoch": 3}, tmp_path / "in.pt")
    assert main(["import", str(tmp_path / "in.pt"), str(tmp_path / "new")]) == 0
    said = capsys.readouterr()
    assert said.out == (f"imported torch as step 0 of {tmp_path}/new: 1 tensors, 8 B; read back, good\n")
    assert said.err == (
        "relight: warning: 1 entries are no tensors and are left out: epoch (no tensor but int 3)\n"
    )
