"""The catalog: claims, commits, listing, candidates, markers, removal and retention on local files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from relight.clock import ManualClock
from relight.errors import ConfigError, CorruptionError, DesyncError, MissingCopyError, StopError
from relight.manifest.catalog import Catalog, CheckpointInfo
from relight.manifest.commit import build_manifest
from relight.manifest.manifest import Manifest, Parent, digest_in, encode_file
from relight.manifest.names import generation_name, image_name, manifest_name, marker_name, record_name
from relight.policy.checkpoint import RetentionRule
from relight.storage.local import LocalBackend
from relight.testing.checkpoints import sample_image, sample_record, write_checkpoint
from relight.testing.files import UnsyncedFiles

TWO_RANKS = [
    {"a": ("U8", (64,), bytes(64)), "b": ("F32", (32,), bytes(128))},
    {"c": ("U8", (64,), b"c" * 64)},
]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(LocalBackend(tmp_path / "run", UnsyncedFiles()), ManualClock())


def steps(infos: list[CheckpointInfo]) -> list[tuple[int, int]]:
    return [(info.step, info.generation) for info in infos]


def parent(step: int, generation: int) -> Parent:
    return Parent(step=step, generation=generation)


def break_byte(catalog: Catalog, name: str, at: int = 40) -> None:
    path = catalog.backend.root / name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


# Generations


def test_claims_count_up_and_inherit_the_run(catalog: Catalog) -> None:
    first = catalog.claim(None)
    second = catalog.claim(parent(5, 1))
    assert (first.generation, first.parent, second.generation, second.parent) == (1, None, 2, parent(5, 1))
    assert first.run == second.run
    assert len(first.run) == 32
    assert catalog.generations() == [first, second]


def test_concurrent_claims_get_numbers_of_their_own(tmp_path: Path) -> None:
    start = threading.Barrier(6)
    claimed: list[tuple[int, str]] = []

    def claim() -> None:
        mine = Catalog(LocalBackend(tmp_path / "run"))
        start.wait()
        made = mine.claim(None)
        claimed.append((made.generation, made.run))

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in claimed) == [1, 2, 3, 4, 5, 6]
    assert len({run for _, run in claimed}) == 1


def test_a_lost_run_identity_is_not_made_up_again(catalog: Catalog) -> None:
    catalog.claim(None)
    break_byte(catalog, generation_name(1))
    with pytest.raises(CorruptionError, match="g0001"):
        catalog.claim(None)


def test_a_newer_claim_fences_what_it_does_not_build_on(catalog: Catalog) -> None:
    catalog.claim(None)
    assert catalog.fenced_by(1, 80) is None
    catalog.claim(parent(50, 1))
    assert (catalog.fenced_by(1, 50), catalog.fenced_by(1, 51), catalog.fenced_by(2, 51)) == (None, 2, None)


def test_a_broken_generation_file_is_replaced_by_what_manifests_say(catalog: Catalog) -> None:
    catalog.claim(None)
    write_checkpoint(catalog, 50)
    write_checkpoint(catalog, 60)
    catalog.claim(parent(50, 1))
    write_checkpoint(catalog, 55, 2, parent=parent(50, 1))
    break_byte(catalog, generation_name(2))
    assert steps(catalog.candidates()) == [(55, 2), (50, 1)]
    assert catalog.fenced_by(1, 60) == 2
    assert [problem.file for problem in catalog.survey().problems] == [generation_name(2)]
    assert catalog.claim(parent(55, 2)).generation == 3


def test_the_run_of_a_lone_broken_generation_file_is_taken_from_its_manifests(catalog: Catalog) -> None:
    first = catalog.claim(None)
    write_checkpoint(catalog, 50)
    break_byte(catalog, generation_name(1))
    claimed = catalog.claim(parent(50, 1))
    assert (claimed.run, claimed.generation) == (first.run, 2)
    assert steps(catalog.candidates()) == [(50, 1)]


# Commit


def test_what_is_stored_whole_is_committed_at_the_next_start(catalog: Catalog) -> None:
    catalog.claim(None)
    run = catalog.generations()[0].run
    for rank in (0, 1):
        store_rank(catalog, rank, run=run)
    store_rank(catalog, 0, step=20, run=run)
    assert catalog.tidy() == [(10, 1)]
    assert steps(catalog.candidates()) == [(10, 1)]
    assert catalog.tidy() == []


def test_a_complete_step_off_the_lineage_is_left_alone(catalog: Catalog) -> None:
    catalog.claim(None)
    for rank in (0, 1):
        store_rank(catalog, rank, run=catalog.generations()[0].run)
    catalog.claim(parent(5, 1))
    assert catalog.tidy() == []


def store_rank(catalog: Catalog, rank: int, *, step: int = 10, world_size: int = 2, **facts) -> None:
    image = sample_image(TWO_RANKS[rank])
    catalog.put_image(step, 1, rank, image)
    catalog.put_record(sample_record(image, step=step, rank=rank, world_size=world_size, **facts))


def test_a_checkpoint_exists_once_every_rank_is_there(catalog: Catalog) -> None:
    assert catalog.commit(10, 1) is None
    store_rank(catalog, 1)
    assert catalog.commit(10, 1) is None
    catalog.put_image(10, 1, 0, sample_image(TWO_RANKS[0]))
    assert catalog.commit(10, 1) is None
    assert not catalog.is_committed(10, 1)
    assert catalog.incomplete() == [(10, 1)]
    store_rank(catalog, 0, metrics={"loss": 1.0})
    manifest = catalog.commit(10, 1)
    assert catalog.is_committed(10, 1)
    assert catalog.incomplete() == []
    assert catalog.manifest(10, 1) == manifest == catalog.commit(10, 1)
    assert manifest.saved_at == 1_700_000_011.0
    assert manifest.metrics == {"loss": 1.0}


def test_hb06_a_record_without_its_image_in_the_same_place_is_no_part_of_a_commit(catalog: Catalog) -> None:
    store_rank(catalog, 0)
    catalog.put_record(sample_record(sample_image(TWO_RANKS[1]), step=10, rank=1, world_size=2))
    assert catalog.commit(10, 1) is None


@pytest.mark.parametrize(
    ("key", "other"),
    [("run", "another"), ("layout", "another"), ("parent", Parent(step=1, generation=1)), ("world_size", 3)],
)
def test_ranks_that_do_not_belong_together_are_not_committed(catalog: Catalog, key: str, other) -> None:
    store_rank(catalog, 0)
    store_rank(catalog, 1, **{key: other})
    with pytest.raises(DesyncError, match=f"ranks 0 and 1 differ in {key}"):
        catalog.commit(10, 1)
    assert not catalog.is_committed(10, 1)


def test_an_image_of_another_size_than_its_record_says_is_not_committed(catalog: Catalog) -> None:
    store_rank(catalog, 0)
    store_rank(catalog, 1)
    os.truncate(catalog.backend.root / image_name(10, 1, 1), 100)
    with pytest.raises(CorruptionError, match="has 100 bytes"):
        catalog.commit(10, 1)


def test_every_finder_writes_the_same_manifest(tmp_path: Path) -> None:
    written = []
    for order in ([0, 1], [1, 0]):
        catalog = Catalog(LocalBackend(tmp_path / str(order)))
        for rank in order:
            store_rank(catalog, rank, replicas_differ=(f"key{rank}",))
        catalog.commit(10, 1)
        written.append(catalog.backend.get(manifest_name(10, 1)))
    assert written[0] == written[1]
    assert catalog.manifest(10, 1).replicas_differ == ("key0", "key1")


def test_hb05_many_committers_at_once_make_one_checkpoint(tmp_path: Path) -> None:
    """Four ranks store, commit and apply keep=1 at the same time, 50 steps long."""
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        mine = Catalog(LocalBackend(tmp_path / "run", UnsyncedFiles()))
        image = sample_image({f"w{rank}": ("U8", (64,), bytes([rank]) * 64)})
        try:
            for step in range(1, 51):
                start.wait()
                mine.put_image(step, 1, rank, image)
                mine.put_record(sample_record(image, step=step, rank=rank, world_size=4, run=run))
                if mine.commit(step, 1) is not None:
                    assert mine.verify(step, 1) == []
                    mine.mark_verified(step, 1)
                    mine.apply_retention(RetentionRule(keep=1))
        except BaseException as error:
            failures.append(error)
            start.abort()
            raise

    run = Catalog(LocalBackend(tmp_path / "run", UnsyncedFiles())).claim(None).run
    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    last = Catalog(LocalBackend(tmp_path / "run", UnsyncedFiles()))
    assert steps(last.committed()) == [(50, 1)]
    assert last.verify(50, 1) == []


class LateBackend(LocalBackend):
    """A cached file system: of the last `num_hidden` files that others stored, this one shows none yet."""

    hidden: set[str]

    def list(self, prefix: str = ""):
        return [file for file in super().list(prefix) if file.name not in self.hidden]

    def size_bytes(self, name: str) -> int | None:
        return None if name in self.hidden else super().size_bytes(name)


def test_hb05_a_finder_that_sees_files_late_commits_late_and_not_wrongly(tmp_path: Path) -> None:
    late = LateBackend(tmp_path / "run")
    late.hidden = {record_name(10, 1, 1), manifest_name(10, 1)}
    catalog = Catalog(late)
    store_rank(catalog, 0)
    store_rank(Catalog(LocalBackend(tmp_path / "run")), 1)
    assert catalog.commit(10, 1) is None
    theirs = Catalog(LocalBackend(tmp_path / "run")).commit(10, 1)
    late.hidden = {manifest_name(10, 1)}
    assert catalog.commit(10, 1) == theirs


class CountingBackend(LocalBackend):
    """Notes what is asked of it."""

    asked: list[str]

    def list(self, prefix: str = ""):
        self.asked.append(f"list {prefix}")
        return super().list(prefix)

    def size_bytes(self, name: str) -> int | None:
        self.asked.append(f"look {name}")
        return super().size_bytes(name)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self.asked.append(f"get {name}")
        return super().get(name, max_bytes=max_bytes)


def store_many(root: Path, num_ranks: int, **facts) -> CountingBackend:
    """Store the images and records of `num_ranks`, and return a backend that counts from here on."""
    backend = CountingBackend(root, UnsyncedFiles())
    backend.asked = []
    catalog = Catalog(backend)
    for rank in range(num_ranks):
        image = sample_image({"w": ("U8", (64,), bytes([rank % 256]) * 64)})
        catalog.put_image(10, 1, rank, image)
        catalog.put_record(sample_record(image, step=10, rank=rank, world_size=num_ranks, **facts))
    backend.asked.clear()
    return backend


def test_thousands_who_look_too_early_cost_a_few_looks_each(tmp_path: Path) -> None:
    backend = store_many(tmp_path, 100)
    missing = [rank for rank in range(1, 100) if rank % 5]
    for rank in missing:
        (tmp_path / record_name(10, 1, rank)).unlink()
    catalog = Catalog(backend)
    assert catalog.commit(10, 1) is None
    assert len(backend.asked) < 10
    assert [call for call in backend.asked if call.startswith("list")] == []


def test_whoever_looks_again_looks_for_what_was_missing(tmp_path: Path) -> None:
    backend = store_many(tmp_path, 100)
    path = tmp_path / image_name(10, 1, 77)
    image = path.read_bytes()
    path.unlink()
    catalog = Catalog(backend)
    assert catalog.commit(10, 1) is None
    backend.asked.clear()
    for _ in range(3):
        assert catalog.commit(10, 1) is None
    assert backend.asked == [f"look {manifest_name(10, 1)}", f"look {image_name(10, 1, 77)}"] * 3
    path.write_bytes(image)
    manifest = catalog.commit(10, 1)
    assert manifest is not None
    assert [rank.image_bytes for rank in manifest.ranks] == [len(image)] * 100


def test_what_was_missing_for_one_step_says_nothing_of_another(catalog: Catalog) -> None:
    for step in range(1, 200):
        assert catalog.commit(step, 1) is None
    for rank in (0, 1):
        store_rank(catalog, rank)
    assert catalog.commit(10, 1) is not None


def test_records_that_are_read_at_once_make_the_same_manifest(tmp_path: Path) -> None:
    manifest = Catalog(store_many(tmp_path, 1200)).commit(10, 1)
    records = [Catalog(LocalBackend(tmp_path)).record(10, 1, rank, manifest) for rank in range(1200)]
    digests = [digest_in(encode_file(record)) for record in records]
    assert manifest == build_manifest(zip(records, digests, strict=True))


def test_of_records_that_are_read_at_once_one_that_does_not_belong_is_found(tmp_path: Path) -> None:
    backend = store_many(tmp_path, 40)
    name = record_name(10, 1, 33)
    image = (tmp_path / image_name(10, 1, 33)).read_bytes()
    other = sample_record(image, step=10, rank=33, world_size=40, layout="other")
    (tmp_path / name).write_bytes(encode_file(other))
    with pytest.raises(DesyncError, match="ranks 0 and 33 differ in layout"):
        Catalog(backend).commit(10, 1)
    break_byte(Catalog(backend), name)
    with pytest.raises(CorruptionError, match="rank-00033"):
        Catalog(backend).commit(10, 1)


def test_a_look_at_the_checkpoints_does_not_look_into_their_directories(tmp_path: Path) -> None:
    backend = store_many(tmp_path, 30)
    catalog = Catalog(backend)
    catalog.claim(None)
    catalog.commit(10, 1)
    backend.asked.clear()
    assert steps(catalog.committed()) == [(10, 1)]
    assert len(backend.asked) == 5


class OtherManifest(LateBackend):
    """Another process commits other content at the moment in which this one looks for the manifest."""

    def put(self, name: str, data: memoryview | bytes, *, if_absent: bool = False) -> bool:
        if name == manifest_name(10, 1):
            (self.root / name).write_bytes(b"other content")
        return super().put(name, data, if_absent=if_absent)


def test_a_manifest_with_other_content_stops(tmp_path: Path) -> None:
    backend = OtherManifest(tmp_path / "run")
    backend.hidden = set()
    catalog = Catalog(backend)
    store_rank(catalog, 0)
    store_rank(catalog, 1)
    with pytest.raises(StopError, match="committed with other content"):
        catalog.commit(10, 1)


def test_a_manifest_is_never_made_of_too_few_records() -> None:
    record = sample_record(sample_image(TWO_RANKS[0]), step=10, world_size=2)
    with pytest.raises(DesyncError, match="1 records for world size 2"):
        build_manifest([(record, "0" * 32)])


def test_a_manifest_has_the_time_of_the_latest_record() -> None:
    image = sample_image(TWO_RANKS[0])
    records = [
        (sample_record(image, step=10, rank=rank, world_size=3, saved_at=at), "0" * 32)
        for rank, at in enumerate((1.0, 3.0, 2.0))
    ]
    assert build_manifest(records).saved_at == 3.0


def test_storing_the_same_again_changes_nothing(catalog: Catalog) -> None:
    image = sample_image(TWO_RANKS[0])
    record = sample_record(image, step=10)
    assert catalog.put_image(10, 1, 0, image)
    assert not catalog.put_image(10, 1, 0, image)
    assert catalog.put_record(record) == catalog.put_record(record)
    manifest = catalog.commit(10, 1)
    assert manifest.ranks[0].record_digest == catalog.put_record(record)


@pytest.mark.parametrize("other", [b"x", sample_image({"z": ("U8", (64,), b"z" * 64)})])
def test_another_image_or_record_of_the_same_place_stops(catalog: Catalog, other: bytes) -> None:
    image = sample_image({"a": ("U8", (64,), bytes(64))})
    catalog.put_image(10, 1, 0, image)
    with pytest.raises(StopError, match="another image"):
        catalog.put_image(10, 1, 0, other)
    catalog.put_record(sample_record(image, step=10))
    with pytest.raises(StopError, match="another record"):
        catalog.put_record(sample_record(image, step=10, saved_at=5.0))
    assert catalog.backend.get(image_name(10, 1, 0)) == image


# Finding


def test_a_checkpoint_is_described_by_its_manifest_and_markers(catalog: Catalog) -> None:
    run = catalog.claim(None).run
    write_checkpoint(catalog, 10**12, tensors=TWO_RANKS, run=run, metrics={"loss": 2.5}, is_verified=True)
    catalog.pin(10**12, 1)
    [info] = catalog.committed()
    assert info == CheckpointInfo(
        step=10**12,
        generation=1,
        run=run,
        bytes=sum(len(sample_image(tensors)) for tensors in TWO_RANKS),
        saved_at=1_700_000_001.0 + 10**12,
        verified=True,
        pinned=True,
        on_lineage=True,
        world_size=2,
        metrics={"loss": 2.5},
        replicas_differ=(),
        manifest_digest=info.manifest_digest,
    )


def test_the_commit_time_is_iso_8601_in_utc(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10)
    assert catalog.committed()[0].committed_at == "2023-11-14T22:13:30.000+00:00"


def test_steps_are_listed_by_number(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (9, 10, 98, 101, 10**12, 10**12 + 5):
        write_checkpoint(catalog, step)
    assert [step for step, _ in steps(catalog.committed())] == [10**12 + 5, 10**12, 101, 98, 10, 9]


def test_candidates_follow_the_lineage(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (40, 50, 60):
        write_checkpoint(catalog, step)
    assert steps(catalog.candidates()) == [(60, 1), (50, 1), (40, 1)]
    catalog.claim(parent(50, 1))
    assert steps(catalog.candidates()) == [(50, 1), (40, 1)]
    write_checkpoint(catalog, 60, 2, parent=parent(50, 1))
    write_checkpoint(catalog, 70, 1)
    assert steps(catalog.candidates()) == [(60, 2), (50, 1), (40, 1)]
    assert [info.on_lineage for info in catalog.committed()] == [False, True, False, True, True]


def test_a_step_whose_replicas_differ_is_chosen_only_when_asked(catalog: Catalog) -> None:
    catalog.claim(None)
    write_checkpoint(catalog, 10)
    write_checkpoint(catalog, 20, replicas_differ=("w",))
    assert steps(catalog.candidates()) == [(10, 1)]
    assert steps(catalog.candidates(with_replicas_differ=True)) == [(20, 1), (10, 1)]


def test_a_broken_manifest_is_reported_and_hides_nothing_else(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (10, 20, 30):
        write_checkpoint(catalog, step)
    break_byte(catalog, manifest_name(20, 1))
    (catalog.backend.root / manifest_name(30, 1)).write_bytes(b"")
    survey = catalog.survey()
    assert steps(survey.checkpoints) == [(10, 1)]
    assert [problem.file for problem in survey.problems] == [manifest_name(20, 1), manifest_name(30, 1)]
    assert survey.incomplete == ()
    with pytest.raises(CorruptionError):
        catalog.manifest(20, 1)


def test_a_directory_that_was_copied_under_another_name_is_reported(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10)
    root = catalog.backend.root
    for copy in ("step-000000000020.g0001", "step-000000000010.g0001-copy"):
        (root / copy).mkdir()
        for path in (root / "step-000000000010.g0001").iterdir():
            (root / copy / path.name).write_bytes(path.read_bytes())
    survey = catalog.survey()
    assert steps(survey.checkpoints) == [(10, 1)]
    assert sorted(problem.file for problem in survey.problems) == [
        "step-000000000010.g0001-copy",
        manifest_name(20, 1),
    ]


def test_hb04_partial_directories_are_never_checkpoints(catalog: Catalog) -> None:
    catalog.claim(None)
    write_checkpoint(catalog, 10)
    root = catalog.backend.root
    for step, names in ((20, []), (30, [".tmp-1-rank-00000.safetensors"]), (40, ["rank-00000.safetensors"])):
        folder = root / f"step-{step:012d}.g0001"
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"half")
    assert steps(catalog.candidates()) == [(10, 1)]
    assert catalog.incomplete() == [(20, 1), (30, 1), (40, 1)]
    assert catalog.survey().problems == ()


def test_what_is_not_committed_cannot_be_read_marked_or_verified(catalog: Catalog) -> None:
    for call in (catalog.manifest, catalog.pin, catalog.mark_verified, catalog.verify):
        with pytest.raises(MissingCopyError):
            call(5, 1)
    assert not catalog.is_verified(5, 1)
    assert tree(catalog.backend.root) == {}


def test_a_record_is_checked_against_the_manifest(catalog: Catalog) -> None:
    manifest = write_checkpoint(catalog, 10, tensors=TWO_RANKS)
    assert catalog.record(10, 1, 1, manifest).draft.rank == 1
    with pytest.raises(MissingCopyError, match="2 ranks"):
        catalog.record(10, 1, 2, manifest)
    other = Catalog(LocalBackend(catalog.backend.root.parent / "other"))
    swapped: Manifest = write_checkpoint(other, 10, tensors=TWO_RANKS, context={"different": True})
    with pytest.raises(CorruptionError, match="not the record that the manifest names"):
        catalog.record(10, 1, 0, swapped)


class VanishingBackend(LocalBackend):
    """Another process removes the files `gone` between the listing and the reading."""

    gone: set[str]

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        if name in self.gone:
            raise MissingCopyError(f"{name} is not there")
        return super().get(name, max_bytes=max_bytes)


def test_what_vanishes_while_it_is_listed_is_no_problem(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (10, 20):
        write_checkpoint(catalog, step, is_verified=True)
    backend = VanishingBackend(catalog.backend.root)
    backend.gone = {manifest_name(10, 1), marker_name(20, 1, "verified")}
    survey = Catalog(backend).survey()
    assert [(info.step, info.verified) for info in survey.checkpoints] == [(20, False)]
    assert survey.incomplete == ((10, 1),)
    assert survey.problems == ()


def test_the_run_is_the_one_that_was_claimed_first(catalog: Catalog) -> None:
    assert catalog.run() is None
    claimed = catalog.claim(None)
    catalog.claim(None)
    assert catalog.run() == claimed.run


# Markers


def test_a_verified_mark_speaks_of_one_manifest(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10)
    assert not catalog.is_verified(10, 1)
    catalog.mark_verified(10, 1)
    catalog.mark_verified(10, 1)
    assert catalog.is_verified(10, 1)
    write_checkpoint(catalog, 20)
    root = catalog.backend.root
    (root / marker_name(20, 1, "verified")).write_bytes((root / marker_name(10, 1, "verified")).read_bytes())
    assert not catalog.is_verified(20, 1)
    assert [problem.file for problem in catalog.survey().problems] == [marker_name(20, 1, "verified")]
    assert [info.verified for info in catalog.committed()] == [False, True]
    catalog.mark_verified(20, 1)
    assert catalog.is_verified(20, 1)
    break_byte(catalog, marker_name(20, 1, "verified"))
    assert not catalog.is_verified(20, 1)
    catalog.mark_verified(20, 1)
    assert catalog.is_verified(20, 1)


def test_marking_as_verified_clears_what_interrupted_writes_left(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10)
    left = catalog.backend.root / "step-000000000010.g0001/.tmp-1-rank-00000.safetensors"
    left.write_bytes(b"half an image")
    catalog.mark_verified(10, 1)
    assert not left.exists()


def test_pins_come_and_go_and_a_broken_pin_still_protects(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (10, 20, 30):
        write_checkpoint(catalog, step, is_verified=True)
    catalog.pin(10, 1)
    catalog.pin(20, 1)
    break_byte(catalog, marker_name(20, 1, "pinned"))
    assert [info.pinned for info in catalog.committed()] == [False, True, True]
    assert catalog.apply_retention(RetentionRule(keep=1)) == []
    catalog.unpin(10, 1)
    catalog.unpin(20, 1)
    assert steps(catalog.apply_retention(RetentionRule(keep=1))) == [(10, 1), (20, 1)]


# Removal and retention


def test_hb01_keep_two_leaves_the_newest_two(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (98, 99, 100, 101):
        write_checkpoint(catalog, step, is_verified=True)
        catalog.apply_retention(RetentionRule(keep=2))
    assert steps(catalog.committed()) == [(101, 1), (100, 1)]
    assert steps(catalog.candidates())[0] == (101, 1)


def test_hb02_nothing_is_removed_before_the_newer_one_is_verified(catalog: Catalog) -> None:
    catalog.claim(None)
    write_checkpoint(catalog, 1, is_verified=True)
    write_checkpoint(catalog, 2)
    assert catalog.apply_retention(RetentionRule(keep=1)) == []
    catalog.mark_verified(2, 1)
    assert steps(catalog.apply_retention(RetentionRule(keep=1))) == [(1, 1)]


def test_hb02_keep_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        RetentionRule(keep=0)


def test_hb03_a_run_that_started_from_another_never_touches_it(tmp_path: Path) -> None:
    source = Catalog(LocalBackend(tmp_path / "X"))
    source.claim(None)
    write_checkpoint(source, 100, is_verified=True)
    before = tree(tmp_path / "X")
    ours = Catalog(LocalBackend(tmp_path / "Y"))
    origin = Parent(step=100, generation=1, source=source.backend.url)
    ours.claim(origin)
    for step in range(101, 106):
        write_checkpoint(ours, step, parent=origin, is_verified=True)
        ours.apply_retention(RetentionRule(keep=1))
    assert tree(tmp_path / "X") == before
    assert steps(ours.committed()) == [(105, 1)]


def test_hb03_checkpoints_of_another_run_under_the_same_root_stay(catalog: Catalog) -> None:
    catalog.claim(None)
    write_checkpoint(catalog, 1, run="someone else's", is_verified=True)
    for step in (2, 3):
        write_checkpoint(catalog, step, is_verified=True)
    catalog.apply_retention(RetentionRule(keep=1))
    assert steps(catalog.committed()) == [(3, 1), (1, 1)]


def test_the_checkpoint_that_the_run_resumed_from_stays_while_protected(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (10, 20, 30):
        write_checkpoint(catalog, step, is_verified=True)
    removed = catalog.apply_retention(RetentionRule(keep=1), protect={(10, 1)})
    assert steps(removed) == [(20, 1)]


def test_unfinished_directories_go_once_they_are_superseded(catalog: Catalog) -> None:
    catalog.claim(None)
    catalog.put_image(5, 1, 0, b"superseded")
    write_checkpoint(catalog, 10)
    catalog.put_image(15, 1, 0, b"being written")
    assert catalog.apply_retention(RetentionRule(keep=1)) == []
    assert catalog.incomplete() == [(15, 1)]
    catalog.claim(parent(10, 1))
    catalog.put_image(12, 2, 0, b"being written")
    catalog.put_image(3, 1, 0, b"protected")
    catalog.apply_retention(RetentionRule(keep=1), protect={(3, 1)})
    assert catalog.incomplete() == [(3, 1), (12, 2)]


def test_a_snapshot_that_the_newest_generation_started_from_may_still_be_written(catalog: Catalog) -> None:
    catalog.claim(None)
    write_checkpoint(catalog, 90)
    catalog.claim(parent(100, 1))
    catalog.put_image(100, 1, 0, b"still drained from memory")
    catalog.apply_retention(RetentionRule(keep=1))
    assert catalog.incomplete() == [(100, 1)]


def test_unfinished_directories_of_a_generation_we_do_not_know_yet_stay(catalog: Catalog) -> None:
    catalog.claim(None)
    write_checkpoint(catalog, 10)
    catalog.put_image(20, 2, 0, b"of a claim that we did not see")
    catalog.apply_retention(RetentionRule(keep=1))
    assert catalog.incomplete() == [(20, 2)]


def test_without_any_commit_nothing_unfinished_is_removed(catalog: Catalog) -> None:
    catalog.claim(None)
    catalog.put_image(5, 1, 0, b"the first save")
    catalog.apply_retention(RetentionRule(keep=1))
    assert catalog.incomplete() == [(5, 1)]


def test_a_plan_changes_nothing_and_says_why(catalog: Catalog) -> None:
    catalog.claim(None)
    for step in (10, 20):
        write_checkpoint(catalog, step, is_verified=True)
    before = tree(catalog.backend.root)
    plan = catalog.plan_retention(RetentionRule(keep=1))
    assert [(r.step, r.reason) for r in plan] == [(10, "1 newer verified, keep is 1")]
    assert tree(catalog.backend.root) == before


def test_removal_of_what_is_not_there_is_no_error(catalog: Catalog) -> None:
    catalog.remove(5, 1)
    write_checkpoint(catalog, 5)
    catalog.remove(5, 1)
    catalog.remove(5, 1)
    assert tree(catalog.backend.root) == {}
