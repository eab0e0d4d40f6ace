"""One flipped bit anywhere in a stored checkpoint: `verify` names file and block, `restore` says so and goes around."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from relight.cli.checking import verify
from relight.manifest.image import read_image_tensors
from relight.manifest.manifest import BLOCK_BYTES
from relight.manifest.names import generation_name, image_name, manifest_name, marker_name, record_name
from tests.integrity.conftest import Stored, broken

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(180)]

RANDOM_FLIPS = 40
IMAGES = [image_name(3, 1, rank) for rank in (0, 1)]
RECORDS = [record_name(3, 1, rank) for rank in (0, 1)]
MARKERS = [marker_name(3, 1, kind) for kind in ("verified", "pinned")]
OTHERS = [manifest_name(3, 1), *RECORDS, *MARKERS, generation_name(1)]


def image_offsets(stored: Stored, name: str) -> list[int]:
    """First, last, around the header, every tensor, every padding and the border of blocks, and some by chance."""
    size = (stored.root / name).stat().st_size
    with (stored.root / name).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    edges = {0, 7, 8, 8 + length - 1, 8 + length, BLOCK_BYTES - 1, BLOCK_BYTES, size - 1}
    for entry in header.values():
        start, stop = entry["data_offsets"]
        edges |= {8 + length + start, 8 + length + stop - 1}
    assert read_image_tensors(stored.catalog.backend, name)
    rng = random.Random(name)
    chance = [rng.randrange(size) for _ in range(RANDOM_FLIPS)]
    header_only = [rng.randrange(8, 8 + length) for _ in range(RANDOM_FLIPS // 4)]
    return [*sorted(edge for edge in edges if edge < size), *header_only, *chance]


def text_offsets(path: Path) -> list[int]:
    """First and last bytes, around digest and body, and some by chance."""
    size = path.stat().st_size
    rng = random.Random(path.name)
    return [
        0,
        9,
        10,
        11,
        42,
        43,
        49,
        50,
        51,
        size - 3,
        size - 2,
        size - 1,
        *(rng.randrange(size) for _ in range(20)),
    ]


def masks(seed: object) -> Iterator[int]:
    rng = random.Random(repr(seed))
    while True:
        yield 1 << rng.randrange(8)


def verified(
    stored: Stored, capsys: pytest.CaptureFixture[str], step: int | None = 3
) -> tuple[int, list[dict]]:
    code = verify(str(stored.root), step=step, json=True)
    return code, json.loads(capsys.readouterr().out)["problems"]


@pytest.mark.parametrize("name", IMAGES)
def test_a_flipped_bit_of_an_image_is_found(stored: Stored, capsys, name: str) -> None:
    for offset, mask in zip(image_offsets(stored, name), masks(name), strict=False):
        with broken(stored.root / name, offset, mask):
            code, problems = verified(stored, capsys)
            assert (code, [(p["file"], p["block"]) for p in problems]) == (1, [(name, offset // BLOCK_BYTES)])
            restored = stored.restore()
            assert (restored.step, restored.is_right()) == (2, True), f"byte {offset}"
            assert "candidate_skipped" in restored.reports


@pytest.mark.parametrize("name", OTHERS)
def test_a_flipped_bit_of_a_text_file_is_found(stored: Stored, capsys, name: str) -> None:
    for offset, mask in zip(text_offsets(stored.root / name), masks(name), strict=False):
        with broken(stored.root / name, offset, mask):
            code, problems = verified(stored, capsys, None if name.startswith("generations") else 3)
            assert code == 1
            assert name in [p["file"] for p in problems], f"byte {offset}"
            restored = stored.restore()
            wanted = 2 if name in (*RECORDS, manifest_name(3, 1)) else 3
            assert (restored.step, restored.is_right()) == (wanted, True), f"byte {offset}"
            assert restored.reports, f"byte {offset}"
            assert name in repr(restored.told)


def test_flips_in_every_step_leave_nothing_to_restore_and_nothing_wrong(stored: Stored) -> None:
    with ExitStack() as stack:
        for step in (1, 2, 3):
            stack.enter_context(broken(stored.root / image_name(step, 1, step % 2), 20_000 + step))
        restored = stored.restore()
        assert (restored.step, restored.is_right()) == (None, True)
        assert restored.reports == ["candidate_skipped"] * 3


def test_all_is_good_without_a_flip(stored: Stored, capsys) -> None:
    assert verified(stored, capsys, None) == (0, [])
    restored = stored.restore()
    assert (restored.step, restored.is_right(), restored.reports) == (3, True, [])


def test_the_command_line_exits_with_1_and_names_file_and_block(stored: Stored) -> None:
    program = "import sys; from relight.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "verify", str(stored.root), "--json"]
    with broken(stored.root / IMAGES[1], BLOCK_BYTES + 5):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert [(p["file"], p["block"]) for p in json.loads(done.stdout)["problems"]] == [(IMAGES[1], 1)]
