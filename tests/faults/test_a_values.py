"""Silent wrong resume: the reports about scalers, generators, wrappers, containers and kinds of tensors."""

from __future__ import annotations

import random
import struct

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from relight import Checkpointer, TrainState
from relight.checkpoint import context
from relight.errors import StateMismatchError
from relight.manifest.manifest import RankRecord
from relight.manifest.names import manifest_name, record_name
from tests.running import Home, restore_once, save_once

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def _kept(home: Home) -> None:
    """Every test here saves by a keeper that is there already."""
    home.keeper()


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return a tensor's dtype, shape and bits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data


@pytest.mark.parametrize("is_late", [False, True], ids=["given", "added-after-restore"])
def test_a13_the_loss_scaler_keeps_its_scale_and_its_counters(home: Home, is_late: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        scaler = torch.amp.GradScaler("cpu", init_scale=8, growth_interval=5)
        return model, torch.optim.SGD(model.parameters(), lr=0.01), scaler

    def scales(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, num: int):
        found = []
        for seed in range(num):
            loss = model(torch.full((2, 4), float(seed))).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        return found

    model, optimizer, scaler = build()
    scales(model, optimizer, scaler, 7)
    save_once(home, TrainState(model=model, optimizer=optimizer, scaler=scaler), step=7)
    saved = scaler.state_dict()
    golden = scales(model, optimizer, scaler, 4)
    assert golden == [16.0, 16.0, 32.0, 32.0]

    model, optimizer, scaler = build()
    if is_late:
        state = TrainState(model=model, optimizer=optimizer)
        with Checkpointer(home.root(), state) as checkpointer:
            checkpointer.restore()
            state.add("scaler", scaler)
    else:
        restore_once(home, TrainState(model=model, optimizer=optimizer, scaler=scaler))
    assert scaler.state_dict() == saved
    assert scales(model, optimizer, scaler, 4) == golden


def a16_draw() -> list[float]:
    return [float(np.random.rand()), random.random(), float(torch.rand(1))]  # noqa: NPY002


def a16_resume(root: str) -> None:
    """Restore where `torch.load` takes nothing but weights, and draw."""
    from relight.testing.trainers import note

    with Checkpointer(root, TrainState(model=nn.Linear(1, 1))) as checkpointer:
        checkpointer.restore()
        note(drawn=a16_draw())


def test_a16_generators_come_back_without_pickle_or_the_restore_fails(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TrainState(model=nn.Linear(1, 1))
    a16_draw()
    save_once(home, state)
    golden = a16_draw()
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    assert home.live(a16_resume, root=home.root(), env={"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}) == [
        [{"drawn": golden}]
    ]

    home.end_keeper()
    drop_part(home, "rng")
    with pytest.raises(StateMismatchError, match="holds no random generators"):
        restore_once(home, state)


def drop_part(home: Home, part: str) -> None:
    """Write the newest checkpoint again without one part of the context."""
    catalog = home.catalog()
    info = catalog.committed()[0]
    record = catalog.record(info.step, info.generation, 0, catalog.manifest(info.step, info.generation))
    parts = context.loads(bytes(record.draft.context))
    del parts[part]
    draft = msgspec.structs.replace(record.draft, context=msgspec.Raw(context.dumps(parts)))
    catalog.backend.delete(manifest_name(info.step, info.generation))
    catalog.backend.delete(record_name(info.step, info.generation, 0))
    catalog.put_record(RankRecord(draft=draft, digests=record.digests))
    assert catalog.commit(info.step, info.generation) is not None


def a17_save(root: str, store: str) -> None:
    """Save a model under data parallelism and compilation, and restore it under data parallelism alone."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    torch.manual_seed(1)
    wrapped = DistributedDataParallel(torch.compile(nn.Linear(3, 3), backend="eager"))
    assert {name.rpartition(".")[0] for name, _ in wrapped.named_parameters()} == {"module._orig_mod"}
    with Checkpointer(root, TrainState(model=wrapped)) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
    plainly = DistributedDataParallel(nn.Linear(3, 3))
    with Checkpointer(root, TrainState(model=plainly)) as checkpointer:
        assert checkpointer.restore() == 1
    assert torch.equal(plainly.module.weight, wrapped.module.weight)
    dist.destroy_process_group()


def test_a17_wrappers_do_not_change_names(home: Home) -> None:
    home.live(a17_save, root=home.root(), store=str(home.path / "store"))
    torch.manual_seed(1)
    expected = nn.Linear(3, 3)
    model = nn.Linear(3, 3)
    assert restore_once(home, TrainState(model=model)) == 1
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)

    renamed = nn.Linear(3, 3)
    before = renamed.weight.clone()
    renamed.register_parameter("offset", nn.Parameter(torch.zeros(3)))
    renamed.register_parameter("bias", None)
    with pytest.raises(StateMismatchError, match=r"(?s)offset: in the model.*bias: in the checkpoint"):
        restore_once(home, TrainState(model=renamed))
    assert torch.equal(renamed.weight, before)


class A18History:
    """Any object with a state."""

    def __init__(self) -> None:
        self.hist: object = []

    def state_dict(self) -> dict[str, object]:
        return {"hist": self.hist}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.hist = state["hist"]


def shape_of(value: object) -> object:
    """Return the structure of `value`: types, keys, leaves, bits of tensors."""
    if isinstance(value, torch.Tensor):
        return raw(value)
    if isinstance(value, dict):
        return dict, [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(item) for item in value]
    return type(value), value


@pytest.mark.parametrize("kind", ["stateful", "plain"])
@pytest.mark.parametrize(
    ("fresh", "saved"),
    [
        ([], [{"a": 1}, {"b": torch.tensor([1.5, 2.5])}]),
        ([{"a": 1}, {"b": torch.zeros(3)}, 4], []),
        ([1], {}),
        ({"old": 1}, ()),
        ((1, 2), [[], {}]),
        ({}, {"x": {"y": (1, [2, torch.tensor(3)])}, 7: None}),
        ({"x": torch.zeros(2)}, {"x": torch.ones(5), "y": [torch.ones(1)]}),
    ],
)
def test_a18_containers_come_back_as_they_were_saved(
    home: Home, kind: str, fresh: object, saved: object
) -> None:
    def state_with(value: object) -> tuple[A18History, TrainState]:
        holder = A18History()
        holder.hist = value
        return holder, TrainState(
            model=nn.Linear(1, 1), extra={"it": holder if kind == "stateful" else value}
        )

    _, state = state_with(saved)
    save_once(home, state)
    holder, state = state_with(fresh)
    restore_once(home, state)
    found = holder.hist if kind == "stateful" else state.extra["it"]
    assert shape_of(found) == shape_of(saved)


def test_a19_every_kind_of_tensor_keeps_its_bits(home: Home) -> None:
    """Views that share memory are stored as values of their own: each is right, the sharing is not kept."""
    a = torch.view_as_complex(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)))
    nan = struct.pack("<4I", 0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000)
    tensors = {
        "complex64": a,
        "real": a.real,
        "imag": a.imag,
        "conj": a.conj(),
        "neg": a.conj().imag,
        "complex128": a.to(torch.complex128),
        "fp8": torch.tensor([0.5, -0.0, 448.0]).to(torch.float8_e4m3fn),
        "bf16": torch.tensor([1.5, -0.0, float("inf")]).to(torch.bfloat16),
        "half": torch.tensor([6e-8, -1.0]).to(torch.float16),
        "bool": torch.tensor([True, False, True]),
        "uint16": torch.tensor([0, 65535], dtype=torch.int32).to(torch.uint16),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 3),
        "payloads": torch.frombuffer(bytearray(nan), dtype=torch.float32),
        "infinite": torch.tensor([float("inf"), -float("inf"), -0.0, 0.0]),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "strided": torch.arange(10)[::3],
        "expanded": torch.tensor([1.0]).expand(3, 4),
    }
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    save_once(home, TrainState(model=nn.Linear(1, 1), extra={"it": tensors}))
    mine: dict[str, torch.Tensor] = {}
    restore_once(home, TrainState(model=nn.Linear(1, 1), extra={"it": mine}))
    assert {name: raw(tensor) for name, tensor in mine.items()} == expected

    class Holder(nn.Module):
        def __init__(self, values: dict[str, torch.Tensor]) -> None:
            super().__init__()
            for name, value in values.items():
                self.register_buffer(f"b_{name}", value)

    save_once(home, TrainState(model=Holder(tensors)), name="buffers")
    blank = {name: torch.zeros(value.shape).to(value.dtype) for name, value in tensors.items()}
    model = Holder(blank)
    restore_once(home, TrainState(model=model), name="buffers")
    assert {name: raw(getattr(model, f"b_{name}")) for name in tensors} == expected
