"""State dicts of one process: what goes in comes out, in relight's format."""

from __future__ import annotations

import dataclasses
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import relight
from relight.cli import main
from relight.dcp import Reader, Writer
from relight.errors import CodecError, ConfigError, MissingCopyError, StateMismatchError, UnknownFormatError
from tests.dcp.saving import catalog_of, error_of, load, save, save_by, steps_of
from tests.running import Home, save_once

BITS = {
    "float32": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
    "nan_payload": torch.tensor([0x7FC01234, -4194303], dtype=torch.int32).view(torch.float32),
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "complex64": torch.randn(4, dtype=torch.complex64),
    "complex128": torch.randn(2, 2, dtype=torch.complex128),
    "bool": torch.tensor([True, False, True]),
    "uint16": torch.arange(5).to(torch.uint16),
    "scalar": torch.tensor(0.5),
    "empty": torch.zeros(0, 3),
    "large": torch.arange(10_000, dtype=torch.float64),
    "transposed": torch.arange(12).view(3, 4).t(),
    "every_second": torch.arange(10)[::2],
}


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def test_tensors_of_every_kind_keep_their_bits(tmp_path: Path) -> None:
    save(dict(BITS), tmp_path)
    loaded = load(blank(BITS), tmp_path)
    assert {name: raw(tensor) for name, tensor in loaded.items()} == {
        name: raw(tensor) for name, tensor in BITS.items()
    }


def test_conjugate_and_negative_views_keep_their_values(tmp_path: Path) -> None:
    whole = torch.randn(3, dtype=torch.complex64)
    views = {"conj": whole.conj(), "imag_of_conj": whole.conj().imag, "real": whole.real}
    save(dict(views), tmp_path)
    loaded = load({name: torch.zeros(3, dtype=view.dtype) for name, view in views.items()}, tmp_path)
    assert {name: view.resolve_conj().resolve_neg().tolist() for name, view in views.items()} == {
        name: tensor.tolist() for name, tensor in loaded.items()
    }
    into = {"conj": torch.zeros(3, dtype=torch.complex64).conj()}
    load(into, tmp_path, allow_extra=["*"])
    assert into["conj"].tolist() == whole.conj().tolist()


def test_h_a01_plain_python_values_come_back_with_their_types(tmp_path: Path) -> None:
    state = {
        "epoch": 20,
        "lr": 1e-5,
        "name": "x",
        "flag": True,
        "none": None,
        "pair": (1, 2),
        "big": 2**200,
        "bytes": b"\x00\xff",
        "nan": float("nan"),
        "array": np.arange(3, dtype=np.int16),
        "dtype": torch.bfloat16,
        "nested": {"list": [1, [2, {"deep": "er"}]], "empty": [], "of": {"a.b": 1}},
    }
    save({**state, "w": torch.ones(2)}, tmp_path)
    fresh = {
        **dict.fromkeys(state),
        "nested": {"list": [0, [0, {"deep": ""}]], "empty": [], "of": {"a.b": 0}},
    }
    loaded = load({**fresh, "w": torch.zeros(2)}, tmp_path)
    assert repr({name: loaded[name] for name in state}) == repr(state)
    assert loaded["w"].tolist() == [1, 1]


def test_tensors_within_tuples_come_back(tmp_path: Path) -> None:
    large = np.arange(2000, dtype=np.float64)
    state = {"moments": (torch.ones(3, 3), [torch.arange(4)], large), "w": torch.zeros(1)}
    save(state, tmp_path)
    loaded = load({"moments": None, "w": torch.ones(1)}, tmp_path)
    first, (second,), third = loaded["moments"]
    assert (first.tolist(), second.tolist()) == (torch.ones(3, 3).tolist(), [0, 1, 2, 3])
    assert third.tolist() == large.tolist()


class Counting:
    """A stateful object: DCP asks for its state, and gives it back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weights = torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_the_stateful_protocol_works(tmp_path: Path) -> None:
    save({"app": Counting(7)}, tmp_path)
    fresh = Counting(0)
    load({"app": fresh}, tmp_path)
    assert (fresh.count, fresh.weights.tolist()) == (7, [7.0, 7.0, 7.0])


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1))
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_model_and_optimizer_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer = trained(0, 3)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, tmp_path)
    other, its_optimizer = trained(1, 1)
    weights, moments = get_state_dict(other, its_optimizer)
    loaded = load({"model": weights, "optimizer": moments}, tmp_path)
    set_state_dict(
        other, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    for one, its in ((model, optimizer), (other, its_optimizer)):
        one(torch.ones(2, 4)).sum().backward()
        its.step()
    assert [raw(p) for p in other.parameters()] == [raw(p) for p in model.parameters()]


def test_h_a16_random_generators_come_back_without_any_trust(tmp_path: Path) -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # noqa: NPY002
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]  # noqa: NPY002
    save(dict(state), tmp_path)
    loaded = load({"python": None, "numpy": None, "torch": torch.zeros_like(state["torch"])}, tmp_path)
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])  # noqa: NPY002
    torch.set_rng_state(loaded["torch"])
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == drawn  # noqa: NPY002


def test_h_a16_a_generator_that_is_not_there_stops_the_load(tmp_path: Path) -> None:
    save({"python": random.getstate()}, tmp_path)
    error = error_of(load, {"python": None, "numpy": None}, tmp_path)
    assert "numpy" in str(error)


@dataclasses.dataclass
class Unknown:
    value: int


def test_a_value_without_a_codec_is_refused_with_its_path_and_the_way_out(tmp_path: Path) -> None:
    error = error_of(save, {"app": {"thing": Unknown(1)}}, tmp_path)
    assert isinstance(error, CodecError)
    assert "app.thing" in str(error)
    assert "relight.register_codec(Unknown" in str(error)
    assert steps_of(tmp_path) == []


@dataclasses.dataclass
class Known:
    value: int


def test_a_class_with_a_codec_of_the_users_comes_back(tmp_path: Path) -> None:
    relight.register_codec(Known, name="dcp-known", encode=lambda one: one.value, decode=Known)
    save({"thing": Known(3)}, tmp_path)
    assert load({"thing": None}, tmp_path) == {"thing": Known(3)}


@pytest.mark.parametrize("name", ["__pad.0", "__metadata__"])
def test_names_that_images_keep_for_themselves_are_refused(tmp_path: Path, name: str) -> None:
    assert isinstance(error_of(save, {name: torch.zeros(2)}, tmp_path), UnknownFormatError)


def test_sparse_tensors_are_refused_by_name(tmp_path: Path) -> None:
    error = error_of(save, {"holes": torch.eye(3).to_sparse()}, tmp_path)
    assert isinstance(error, UnknownFormatError)
    assert "holes" in str(error)


def test_relights_commands_see_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"model": {"w": torch.ones(3, 4)}, "epoch": 2}, tmp_path, step=1000)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [1000]
    assert main(["show", str(tmp_path), "--tensors", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["tensors"]] == ["model.w"]
    assert main(["verify", str(tmp_path)]) == 0


def test_images_are_plain_safetensors_files(tmp_path: Path) -> None:
    save({"model": {"w": torch.arange(6.0).view(2, 3)}}, tmp_path)
    (image,) = tmp_path.glob("step-*/rank-00000.safetensors")
    with safe_open(image, "pt") as file:
        assert file.get_tensor("model.w").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_torchs_own_converter_reads_through_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"model": {"w": torch.arange(6.0)}, "epoch": 2, "steps": [1, 2]}, tmp_path / "run")
    monkeypatch.setattr("torch.distributed.checkpoint.format_utils.FileSystemReader", Reader)
    dcp_to_torch_save(tmp_path / "run", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert (found["model"]["w"].tolist(), found["epoch"], found["steps"]) == ([0, 1, 2, 3, 4, 5], 2, [1, 2])


# Places and steps


def test_steps_without_a_number_are_counted(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for value in (1.0, 2.0, 3.0):
        save_by(writer, {"w": torch.full((2,), value)})
    assert steps_of(tmp_path) == [(3, 1), (2, 1), (1, 1)]
    assert load({"w": torch.zeros(2)}, tmp_path)["w"].tolist() == [3, 3]
    assert load({"w": torch.zeros(2)}, tmp_path, step=2)["w"].tolist() == [2, 2]


def test_a_new_writer_of_the_same_process_goes_on_in_the_same_generation(tmp_path: Path) -> None:
    for step in (10, 20):
        save({"w": torch.full((2,), float(step))}, tmp_path, step=step)
    assert steps_of(tmp_path) == [(20, 1), (10, 1)]


def test_a_checkpoint_id_is_a_place_of_its_own_and_its_name_says_the_step(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for name, step in {"step-1000": 1000, "epoch=3-step=70.ckpt": 70, "last.ckpt": 1}.items():
        save_by(writer, {"w": torch.full((2,), float(step))}, checkpoint_id=tmp_path / name)
        assert steps_of(tmp_path / name) == [(step, 1)]
        assert load({"w": torch.zeros(2)}, tmp_path / name)["w"].tolist() == [step, step]


def test_the_directory_of_a_checkpoint_can_be_read_and_is_never_written(tmp_path: Path) -> None:
    for step in (1, 2):
        save({"w": torch.full((2,), float(step))}, tmp_path, step=step)
    folder = tmp_path / "step-000000000001.g0001"
    assert load({"w": torch.zeros(2)}, folder)["w"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="never written again"):
        Writer(folder)


def test_the_metadata_that_dcp_returns_says_where_the_checkpoint_is(tmp_path: Path) -> None:
    metadata = save({"w": torch.ones(2)}, tmp_path, step=5)
    assert metadata.storage_meta.checkpoint_id == f"file://{tmp_path}/step-000000000005.g0001"


def test_going_back_to_an_older_step_leaves_the_newer_ones_behind(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save({"w": torch.full((2,), float(step))}, tmp_path, step=step)
    load({"w": torch.zeros(2)}, tmp_path, step=1)
    save({"w": torch.full((2,), 20.0)}, tmp_path, step=2)
    assert [(one.step, one.generation) for one in catalog_of(tmp_path).candidates()] == [(2, 2), (1, 1)]
    assert load({"w": torch.zeros(2)}, tmp_path)["w"].tolist() == [20, 20]


def test_nothing_to_load_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    error = error_of(load, {"w": torch.zeros(2)}, tmp_path)
    assert "no checkpoint is committed" in str(error)
    save({"w": torch.ones(2)}, tmp_path, step=4)
    with pytest.raises(MissingCopyError, match="step 5 is not committed; committed steps: 4"):
        Reader(tmp_path, step=5).read_metadata()


def test_only_the_newest_checkpoints_are_kept_when_asked(tmp_path: Path) -> None:
    for step in range(1, 5):
        save({"w": torch.full((2,), float(step))}, tmp_path, step=step, keep=2)
    assert steps_of(tmp_path) == [(4, 1), (3, 1)]
    assert all(info.verified for info in catalog_of(tmp_path).committed())


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with pytest.raises(ConfigError, match="use_collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


@pytest.mark.parametrize(
    "options", [{"step": -1}, {"step": 1.0}, {"step": True}, {"compare": "some"}, {"keep": 0}]
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Writer(tmp_path, **options)
    with pytest.raises(ConfigError):
        Reader(tmp_path, allow_extra="model.*")


# Planners of users


class Renaming(DefaultSavePlanner):
    """Saves under other names, as the documentation of DCP shows."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(
            {f"foo_{name}": value for name, value in state_dict.items()}, storage_meta, is_coordinator
        )


class Halving(DefaultSavePlanner):
    """Saves in half precision, as the documentation of DCP means it."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value.to(torch.float16) if isinstance(value, torch.Tensor) else value


class Lying(Halving):
    """Plans one dtype and gives another."""

    def resolve_data(self, write_item: Any) -> Any:
        return DefaultSavePlanner.resolve_data(self, write_item)


def test_planners_of_users_are_obeyed(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "n": 3}, tmp_path / "a", planner=Renaming())
    assert load({"foo_w": torch.zeros(2), "foo_n": 0}, tmp_path / "a")["foo_n"] == 3
    save({"w": torch.full((2,), 0.1), "n": 3}, tmp_path / "b", planner=Halving())
    loaded = load({"w": torch.zeros(2, dtype=torch.float16), "n": 0}, tmp_path / "b")
    assert (loaded["w"].tolist(), loaded["n"]) == (torch.full((2,), 0.1).half().tolist(), 3)


def test_a_planner_that_gives_what_it_did_not_plan_is_refused(tmp_path: Path) -> None:
    error = error_of(save, {"w": torch.ones(2)}, tmp_path, planner=Lying())
    assert isinstance(error, StateMismatchError)
    assert "w" in str(error)


def test_an_unflattened_state_dict_works(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save({"w": torch.ones(2), "settings": {"a": [1, 2]}}, tmp_path, planner=planner)
    fresh = {"w": torch.zeros(2), "settings": None}
    # Where it flattens sharded tensors alone, torch gives values to a copy of the dict.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    loaded = load(fresh, tmp_path, planner=planner)
    assert (loaded["w"].tolist(), loaded["settings"]) == ([1, 1], {"a": [1, 2]})


@pytest.mark.multiprocess
def test_checkpoints_of_relights_own_can_be_read_key_by_key(home: Home) -> None:
    model = nn.Linear(3, 2)
    home.keeper()
    save_once(home, relight.TrainState(model=model), step=7)
    loaded = load({"model/weight": torch.zeros(2, 3)}, home.root(), allow_extra=["*"])
    assert torch.equal(loaded["model/weight"], model.weight.detach())


def test_streams_of_bytes_come_back_with_their_position(tmp_path: Path) -> None:
    stream = io.BytesIO(b"losses")
    stream.seek(3)
    save({"losses": stream, "w": torch.ones(1)}, tmp_path)
    loaded = load({"losses": None, "w": torch.zeros(1)}, tmp_path)["losses"]
    assert (loaded.getvalue(), loaded.tell()) == (b"losses", 3)
