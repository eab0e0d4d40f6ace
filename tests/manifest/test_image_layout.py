"""The layout of a rank image: what docs/format.md promises, held against the planner and a foreign reader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.manifest.image import read_image_tensors
from relight.storage.local import LocalBackend

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

from relight.checkpoint.format import DTYPES, ImageLayout, TensorSpec, plan_image  # noqa: E402

# What the installed reader knows; relight stores more.
READABLE = sorted(
    set(DTYPES)
    & {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "bool", "complex128"}
)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
layouts = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    max_size=12,
).map(
    lambda entries: [TensorSpec(f"t{at}/\u00fc", dtype, shape) for at, (dtype, shape) in enumerate(entries)]
)


def image_of(specs: Sequence[TensorSpec]) -> tuple[ImageLayout, bytes]:
    """Return the plan and the image whose tensors are filled with their number plus one."""
    layout = plan_image(specs)
    image = bytearray(layout.image_bytes)
    image[: len(layout.header)] = layout.header
    for at, (spec, start) in enumerate(zip(specs, layout.offsets, strict=True)):
        image[start : start + spec.num_bytes] = bytes([at + 1]) * spec.num_bytes
    return layout, bytes(image)


def header_of(image: bytes) -> dict[str, dict]:
    return json.loads(image[8 : 8 + int.from_bytes(image[:8], "little")])


@given(layouts)
def test_the_header_ends_at_a_multiple_of_64_and_depends_on_the_layout_alone(specs: list[TensorSpec]) -> None:
    layout, _ = image_of(specs)
    assert len(layout.header) % 64 == 0
    assert layout.header[:8] == (len(layout.header) - 8).to_bytes(8, "little")
    assert layout.header[8:].isascii()
    assert plan_image(list(specs)) == layout


@given(layouts)
def test_large_tensors_start_at_multiples_of_64(specs: list[TensorSpec]) -> None:
    layout, _ = image_of(specs)
    large = [start for spec, start in zip(specs, layout.offsets, strict=True) if spec.num_bytes >= 64]
    assert [start for start in large if start % 64] == []


def test_small_tensors_start_at_their_natural_alignment_behind_a_large_one_of_odd_size() -> None:
    layout, _ = image_of([TensorSpec("large", "bfloat16", (3, 3, 4)), TensorSpec("small", "complex128", ())])
    assert layout.offsets[1] % 16 == 0


@given(layouts)
def test_entries_and_padding_cover_the_data_without_hole_or_overlap(specs: list[TensorSpec]) -> None:
    layout, image = image_of(specs)
    entries = header_of(image)
    spans = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
    at = 0
    for start, end in spans:
        assert start == at
        at = end
    assert at == len(image) - len(layout.header)
    pads = [name for name in entries if name.startswith("__pad.")]
    assert pads == [f"__pad.{number}" for number in range(len(layout.pads))]
    assert all(entries[name]["dtype"] == "U8" for name in pads)
    assert set(entries) == {spec.name for spec in specs} | set(pads)


@given(layouts)
def test_the_image_is_read_without_torch_as_it_was_planned(specs: list[TensorSpec]) -> None:
    class OneFile(LocalBackend):
        def size_bytes(self, name: str) -> int:
            return len(image)

        def read_into(self, name: str, offset_bytes: int, target: memoryview) -> None:
            target[:] = image[offset_bytes : offset_bytes + target.nbytes]

    layout, image = image_of(specs)
    found = read_image_tensors(OneFile(Path("unused")), "image")
    for at, (spec, start) in enumerate(zip(specs, layout.offsets, strict=True)):
        tensor = found[spec.name]
        assert image[tensor.start_bytes : tensor.end_bytes] == bytes([at + 1]) * spec.num_bytes
        assert tensor.start_bytes == start
        assert tensor.shape == spec.shape + ((2,) if spec.dtype == "complex128" else ())
    assert len(found) == len(specs)


def test_a_foreign_safetensors_reader_sees_the_same_tensors() -> None:
    import safetensors.torch

    specs = [TensorSpec(f"{name}.{size}", name, (size,)) for name in READABLE for size in (0, 1, 3, 33)]
    _, image = image_of(specs)
    read = safetensors.torch.load(image)
    for at, spec in enumerate(specs):
        tensor = read[spec.name]
        stored = torch.view_as_complex(tensor) if spec.dtype == "complex128" and tensor.numel() else tensor
        assert stored.shape[:1] == spec.shape
        assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == bytes([at + 1]) * spec.num_bytes
