"""Tensors of a stored checkpoint are put together from any layout, and no block is used unchecked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from relight.errors import CorruptionError, MissingCopyError
from relight.manifest.catalog import Catalog
from relight.manifest.index import ITEM_BYTES
from relight.manifest.manifest import BLOCK_BYTES
from relight.manifest.names import image_name, record_name
from relight.manifest.shard import Layout
from relight.manifest.tensors import CheckpointTensors
from relight.storage.local import LocalBackend
from relight.testing.files import UnsyncedFiles
from tests.convert.stored import Content, noise, store

FOUR = tuple(range(4))
LAYOUTS = {
    "plain": Layout(),
    "elsewhere": Layout(base=2),
    "replicated": Layout.on((4,), FOUR),
    "rows": Layout.on((4,), FOUR, ((0, 0),)),
    "columns": Layout.on((4,), FOUR, ((0, 1),)),
    "rows x columns": Layout.on((2, 2), FOUR, ((0, 0), (1, 1))),
    "rows twice": Layout.on((2, 2), FOUR, ((0, 0), (1, 0))),
    "hybrid": Layout.on((2, 2), FOUR, ((1, 0),)),
    "odd ranks": Layout.on((3,), (3, 0, 1), ((0, 1),)),
}
SHAPES = ((), (0,), (1,), (7,), (5, 3), (4, 8), (0, 4), (6, 5, 2))


def read_all(stored: CheckpointTensors, key: str, step: int | None = None) -> bytes:
    tensor = stored.tensor(key)
    found = bytearray(tensor.num_bytes)
    step = step or max(tensor.num_bytes, 1)
    for start in range(0, tensor.num_bytes, step):
        tensor.read(start, memoryview(found)[start : start + step])
    return bytes(found)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_and_shape_reads_whole(catalog: Catalog, layout: Layout) -> None:
    deepest = max((dim for _, dim in layout.splits), default=-1)
    content = {
        f"model/{dtype}.{number}": noise(number, dtype, shape)
        for number, shape in enumerate(SHAPES)
        for dtype in ITEM_BYTES
        if len(shape) > deepest
    }
    store(catalog, content, dict.fromkeys(content, layout), world_size=4)
    stored = CheckpointTensors(catalog, 1, 1)
    assert stored.keys() == sorted(content)
    for key, (dtype, shape, data) in content.items():
        tensor = stored.tensor(key)
        assert (tensor.dtype, tensor.shape, tensor.num_bytes) == (dtype, shape, len(data))
        assert read_all(stored, key) == data
        assert read_all(stored, key, 16) == data


def test_what_each_rank_has_of_its_own_is_read_from_the_rank_that_is_asked_for(catalog: Catalog) -> None:
    own = [
        {"model/mean": noise(rank, "float32", (3,)), "rng/x": noise(9, "uint8", (4,))} for rank in range(2)
    ]
    content = {"model/w": noise(5, "float32", (4, 4))}
    store(catalog, content, world_size=2, own=own, equal=frozenset({"rng/x"}))
    for rank in range(2):
        stored = CheckpointTensors(catalog, 1, 1, rank)
        assert read_all(stored, "model/mean") == own[rank]["model/mean"][2]
        assert [stored.is_per_rank(key) for key in ("model/mean", "model/w", "rng/x")] == [True, False, False]
    with pytest.raises(MissingCopyError, match="ranks 0 to 1, no rank 2"):
        CheckpointTensors(catalog, 1, 1, 2)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Catalog, Content]:
    """Return a checkpoint of two ranks whose images have two blocks each, tensors cut by columns and by rows."""
    catalog = Catalog(LocalBackend(tmp_path_factory.mktemp("large") / "run", UnsyncedFiles()))
    content = {
        "model/columns": noise(1, "int8", (3000, 12000)),
        "model/rows": noise(2, "int16", (5, 1000)),
    }
    layouts = {
        "model/columns": Layout.on((2,), (0, 1), ((0, 1),)),
        "model/rows": Layout.on((2,), (0, 1), ((0, 0),)),
    }
    store(catalog, content, layouts, world_size=2)
    return catalog, content


def test_pieces_of_several_images_are_read_about_twice_at_most(
    large: tuple[Catalog, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, content = large
    stored = CheckpointTensors(catalog, 1, 1)
    num_read = 0
    read_into = LocalBackend.read_into

    def counting(backend: LocalBackend, name: str, offset: int, target: memoryview) -> None:
        nonlocal num_read
        num_read += target.nbytes
        read_into(backend, name, offset, target)

    monkeypatch.setattr(LocalBackend, "read_into", counting)
    assert read_all(stored, "model/columns", 2**20) == content["model/columns"][2]
    assert num_read < 3.5 * len(content["model/columns"][2])


def flipped(catalog: Catalog, name: str, at: int) -> None:
    path = Path(catalog.backend.url.removeprefix("file://")) / name
    with path.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("block", [0, 1])
def test_a_flipped_byte_is_found_and_its_file_and_block_named(
    large: tuple[Catalog, Content], rank: int, block: int
) -> None:
    catalog, _ = large
    name = image_name(1, 1, rank)
    at = random.Random(rank).randrange(block * BLOCK_BYTES + 5000, block * BLOCK_BYTES + 900_000)
    flipped(catalog, name, at)
    try:
        with pytest.raises(CorruptionError, match=f"{name}: block {block} differs") as caught:
            read_all(CheckpointTensors(catalog, 1, 1), "model/columns", 2**20)
        assert (caught.value.path, caught.value.details["block"]) == (name, block)
    finally:
        flipped(catalog, name, at)


def test_a_byte_that_changes_after_its_block_was_checked_is_found(large: tuple[Catalog, Content]) -> None:
    catalog, content = large
    stored = CheckpointTensors(catalog, 1, 1)
    tensor = stored.tensor("model/columns")
    target = memoryview(bytearray(2**20))
    tensor.read(0, target)
    tensor.read(len(content["model/columns"][2]) - 2**20, target)
    flipped(catalog, image_name(1, 1, 0), 3_000_000)
    try:
        with pytest.raises(CorruptionError, match="block 0 differs"):
            tensor.read(5_500_000, target)
    finally:
        flipped(catalog, image_name(1, 1, 0), 3_000_000)


def test_a_cut_image_and_a_foreign_record_are_found(catalog: Catalog) -> None:
    store(catalog, {"model/w": noise(1, "float32", (100,))})
    root = Path(catalog.backend.url.removeprefix("file://"))
    image = root / image_name(1, 1, 0)
    image.write_bytes(image.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="block 0 is cut short"):
        CheckpointTensors(catalog, 1, 1).keys()
    flipped(catalog, record_name(1, 1, 0), 50)
    with pytest.raises(CorruptionError, match="digest"):
        CheckpointTensors(catalog, 1, 1).keys()
