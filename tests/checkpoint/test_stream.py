"""FileStream: one global order over many files, the same on any number of ranks, resumable at any global batch."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import relight
from relight.checkpoint import context, rng, stream_records
from relight.checkpoint.stream import FileStream
from relight.errors import ConfigError, CorruptionError, StateMismatchError, StorageUnavailableError


def write(folder, contents):
    """Write files of lines (a list), or of bytes."""
    paths = []
    for name, content in contents.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            content if isinstance(content, bytes) else b"".join(line + b"\n" for line in content)
        )
        paths.append(path)
    return paths


def numbered(counts):
    """Return files of the given numbers of lines, each line another."""
    return {
        f"part-{at}.txt": [b"%d.%d" % (at, line) for line in range(count)] for at, count in enumerate(counts)
    }


def stored(saved):
    """Send a position through the file format."""
    return context.decode(context.loads(context.dumps(context.encode(saved, path="data/"))))


def batches(streams, num_batches=None):
    """Return the global batches from the streams' position to the end of the epoch, one stream per rank."""
    taken = []
    parts = [iter(stream) for stream in streams]
    size = streams[0].sampler.global_batch // len(streams)
    for _ in itertools.count() if num_batches is None else range(num_batches):
        batch = [record for part in parts for record in itertools.islice(part, size)]
        if not batch:
            break
        taken.append(batch)
    return taken


def ranks(paths, world_size, **options):
    return [FileStream(paths, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def length_prefixed(file):
    return file.read(int.from_bytes(file.read(2), "little"))


# -- what a record is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
def test_records_are_lines_in_the_order_of_the_files(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(stream_records, "_CHUNK_BYTES", chunk)
    contents = {
        "a": b"one\ntwo\n",
        "b": b"",
        "c": b"no newline at the end",
        "d": b"\n\ncarriage\r\n",
        "e": b"\n",
        "f": bytes(range(11, 256)) + b"\n\xff",
    }
    stream = FileStream(write(tmp_path, contents), global_batch=1)
    expected = [
        b"one",
        b"two",
        b"no newline at the end",
        b"",
        b"",
        b"carriage\r",
        b"",
        bytes(range(11, 256)),
        b"\xff",
    ]
    assert list(stream) == expected
    assert stream.records_per_epoch == len(expected)


def test_records_of_a_fixed_length_are_counted_without_reading(tmp_path):
    paths = write(tmp_path, {"a": b"aabbcc", "b": b"", "c": b"dd"})
    stream = FileStream(paths, records=2, global_batch=2)
    assert stream.records_per_epoch == 4
    assert list(stream) == [b"aa", b"bb", b"cc", b"dd"]


def test_long_files_of_fixed_records_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_records, "_CHUNK_RECORDS", 3)
    paths = write(tmp_path, {"a": bytes(range(16))})
    assert b"".join(FileStream(paths, records=2, global_batch=1)) == bytes(range(16))


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_records_are_what_the_users_splitter_reads(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(stream_records, "_CHUNK_BYTES", chunk)
    records = [b"", b"x", b"y" * 500, b"z"]
    framed = b"".join(len(record).to_bytes(2, "little") + record for record in records)
    stream = FileStream(
        write(tmp_path, {"a": framed, "b": b"", "c": framed}), records=length_prefixed, global_batch=4
    )
    assert list(stream) == records * 2


def test_a_splitter_may_return_any_object(tmp_path):
    paths = write(tmp_path, {"a": [b"1", b"2"]})
    assert list(FileStream(paths, records=lambda file: int(file.readline()), global_batch=1)) == [1, 2]


def test_a_splitter_that_reads_nothing_is_refused(tmp_path):
    paths = write(tmp_path, {"a": b"abc"})
    with pytest.raises(ConfigError, match=r"went from byte 0 to 0 of .*/a, of 3"):
        list(FileStream(paths, records=lambda _: b"", global_batch=1))


def test_a_splitter_that_reads_another_record_from_the_same_place_is_refused(tmp_path):
    sizes = iter([2, 1, 1])
    paths = write(tmp_path, {"a": b"abc"})
    with pytest.raises(ConfigError, match="read the same record from the same place"):
        list(FileStream(paths, records=lambda file: file.read(next(sizes)), global_batch=1))


def test_an_error_of_the_splitter_says_where_it_was(tmp_path):
    def failing(file):
        if file.tell():
            raise KeyError("header")
        return file.read(2)

    paths = write(tmp_path, {"a": b"abcd"})
    with pytest.raises(KeyError) as caught:
        list(FileStream(paths, records=failing, global_batch=1))
    assert caught.value.__notes__ == [f"in the record at byte 2 of {paths[0]}"]


def test_an_error_of_the_transform_says_where_it_was(tmp_path):
    paths = write(tmp_path, {"a": [b"1", b"x"]})
    stream = FileStream(paths, global_batch=1, transform=int)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(stream)
    assert caught.value.__notes__ == [f"in the transform of record 1 (byte 2) of {paths[0]}, epoch 0"]


# -- the order ----------------------------------------------------------------------------------------------


COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
ORDERS = st.fixed_dictionaries(
    {
        "global_batch": st.sampled_from([4, 8, 12]),
        "seed": st.integers(0, 3),
        "shuffle_files": st.booleans(),
        "shuffle_window": st.sampled_from([0, 1, 2, 3, 5, 16, 1000]),
        "drop_last": st.booleans(),
    }
)


def is_enough(counts, options):
    return sum(counts) >= (options["global_batch"] if options["drop_last"] else 1)


@given(COUNTS.flatmap(lambda counts: st.tuples(st.just(counts), ORDERS)), st.sampled_from([1, 2, 4]))
def test_the_union_of_the_ranks_is_the_global_order_and_an_epoch_holds_each_record_once(case, world_size):
    counts, options = case
    with tempfile.TemporaryDirectory() as folder:
        contents = numbered(counts)
        paths = write(folder, contents)
        if not is_enough(counts, options):
            with pytest.raises(ConfigError, match="records"):
                list(FileStream(paths, **options))
            return
        whole = FileStream(paths, **options)
        expected = batches([whole])
        assert batches(ranks(paths, world_size, **options)) == expected
        every = [line for lines in contents.values() for line in lines]
        seen = [record for batch in expected for record in batch]
        if options["drop_last"]:
            assert len(seen) == len(every) // options["global_batch"] * options["global_batch"]
            assert not Counter(seen) - Counter(every)
        else:
            assert sorted(seen) == sorted(every)
        assert whole.records_per_epoch == len(every)
        assert whole.epoch == 1


@given(
    COUNTS.flatmap(lambda counts: st.tuples(st.just(counts), ORDERS)),
    st.data(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_resuming_anywhere_on_any_number_of_ranks_goes_on_with_the_straight_run(case, data, before, after):
    counts, options = case
    if not is_enough(counts, options):
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = write(folder, numbered(counts))
        straight = FileStream(paths, **options)
        epochs = [batches([straight]) for _ in range(3)]
        expected = [batch for epoch in epochs for batch in epoch]
        stop = data.draw(st.integers(0, len(expected) - 1), label="saved at step")
        first = ranks(paths, before, **options)
        taken: list[list[bytes]] = []
        while len(taken) < stop:
            taken += batches(first, min(stop - len(taken), len(epochs[0])))
            for stream in first:
                stream.advance_to(len(taken))
        saves = [stored(stream.state_at(stop)) for stream in first]
        assert saves == saves[:1] * before
        assert saves[0]["samples_in_epoch"] == stop % len(epochs[0]) * options["global_batch"]
        second = ranks(paths, after, **options)
        for stream in second:
            stream.load(saves[0])
            assert stored(stream.state_at(stop)) == saves[0]
        taken += batches(second)
        epoch = stop // len(epochs[0])
        taken += batches(second) if epoch < 2 else []
        assert taken == expected[: len(taken)]
        assert len(taken) == min(epoch + 2, 3) * len(epochs[0])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_batches_are_dealt_to_workers_in_turn(num_workers, batch_size, num_lines):
    with tempfile.TemporaryDirectory() as folder:
        paths = write(folder, numbered([num_lines, 1]))
        options = {"global_batch": 1, "batch_size": batch_size}
        expected = [place.ordinal for place in FileStream(paths, **options).sampler]
        workers = []
        for worker in range(num_workers):
            stream = FileStream(paths, **options)
            workers.append(
                [place.ordinal for place in stream._share(iter(stream.sampler), worker, num_workers)]
            )
        dealt = [iter(part) for part in workers]
        taken = []
        for turn in range(num_lines + 1):
            taken += itertools.islice(dealt[turn % num_workers], batch_size)
        assert taken == expected


def test_shuffled_files_stay_whole_and_take_other_turns_in_each_epoch(tmp_path):
    contents = numbered([2] * 8)
    stream = FileStream(write(tmp_path, contents), global_batch=2, shuffle_files=True)
    orders = [batches([stream]) for _ in range(4)]
    for order in orders:
        assert sorted(order) == sorted(contents.values())
    assert len({str(order) for order in orders}) == 4
    assert batches([FileStream(str(tmp_path / "part-*"), global_batch=2, shuffle_files=True)]) == orders[0]
    assert (
        batches([FileStream(str(tmp_path / "part-*"), global_batch=2, shuffle_files=True, seed=1)])
        != orders[0]
    )


def test_a_shuffle_window_shuffles_within_itself(tmp_path):
    paths = write(
        tmp_path, {"a": [b"%d" % at for at in range(50)], "b": [b"%d" % at for at in range(50, 103)]}
    )
    stream = FileStream(paths, global_batch=1, shuffle_window=20, transform=int)
    first, second = list(stream), list(stream)
    for order in (first, second):
        windows = [order[at : at + 20] for at in range(0, 103, 20)]
        assert [sorted(window) for window in windows] == [
            list(range(at, min(at + 20, 103))) for at in range(0, 103, 20)
        ]
        assert all(window != sorted(window) for window in windows[:-1])
    assert first != second


def test_the_order_is_frozen(tmp_path):
    """A checkpoint's meaning hangs on it; it must be the same in every version and on every machine."""
    paths = write(tmp_path, {name: [b"%s%d" % (name.encode(), at) for at in range(3)] for name in "abc"})
    stream = FileStream(paths, global_batch=1, seed=8, shuffle_files=True, shuffle_window=4)
    assert [b" ".join(stream).decode() for _ in range(2)] == FROZEN


FROZEN = ["b0 c2 c0 c1 a1 b2 a0 b1 a2", "a0 c0 c2 c1 a1 b0 b1 a2 b2"]


def test_epochs_follow_one_another(tmp_path):
    paths = write(tmp_path, numbered([3, 4]))
    stream = FileStream(paths, global_batch=2)
    assert (stream.epoch, stream.records_per_epoch) == (0, None)
    assert len(list(stream)) == 6
    assert (stream.epoch, stream.records_per_epoch) == (1, 7)
    assert len(list(stream)) == 6
    assert stream.epoch == 2


def test_the_first_epoch_can_be_chosen_before_the_run_begins(tmp_path):
    paths = write(tmp_path, numbered([3, 4]))
    options = {"global_batch": 2, "shuffle_files": True, "seed": 3}
    straight = FileStream(paths, **options)
    epochs = [batches([straight]) for _ in range(4)]
    stream = FileStream(paths, **options)
    stream.set_epoch(2)
    assert [batches([stream]) for _ in range(2)] == epochs[2:]
    stream.advance_to(6)
    stream.set_epoch(4)
    with pytest.raises(ConfigError, match=r"FileStream: set_epoch\(1\), but the data position is in epoch 4"):
        stream.set_epoch(1)


# -- the position -------------------------------------------------------------------------------------------


def test_a_position_names_file_record_and_byte(tmp_path):
    paths = write(tmp_path, {"a": [b"1", b"22", b"333"], "b": b"", "c": [b"4444", b"55555", b"6"]})
    stream = FileStream(paths, global_batch=1)
    list(stream)
    names = ("file", "record", "byte")
    found = [tuple(stream.state_at(step)[name] for name in names) for step in range(8)]
    expected = [
        ("a", 0, 0),
        ("a", 1, 2),
        ("a", 2, 5),
        ("c", 0, 0),
        ("c", 1, 5),
        ("c", 2, 11),
        ("a", 0, 0),
        ("a", 1, 2),
    ]
    assert found == expected
    assert stream.state_at(7) == {
        "step": 7,
        "epoch": 1,
        "step_in_epoch": 1,
        "samples_in_epoch": 1,
        "consumed_samples": 7,
        "global_batch": 1,
        "file": "a",
        "record": 1,
        "byte": 2,
        "in_window": 0,
        "basis": stream.state_at(7)["basis"],
    }


def test_a_position_in_a_shuffle_window_is_the_windows_start_and_what_is_consumed_of_it(tmp_path):
    paths = write(tmp_path, {"a": [b"%d" % at for at in range(7)], "b": [b"%d" % at for at in range(10, 20)]})
    stream = FileStream(paths, global_batch=2, shuffle_window=5)
    list(stream)
    position = stream.state_at(6)
    assert [position[name] for name in ("file", "record", "byte", "in_window")] == ["b", 3, 9, 2]


def test_the_end_of_an_epoch_is_the_start_of_the_next_even_before_the_end_was_read(tmp_path):
    stream = FileStream(write(tmp_path, numbered([2, 2])), global_batch=2)
    iterator = iter(stream)
    for step in (1, 2):
        next(iterator), next(iterator)
        stream.advance_to(step)
    position = stream.state_at(2)
    assert (position["epoch"], position["step_in_epoch"], position["file"]) == (1, 0, "part-0.txt")
    assert next(iterator, None) is None
    assert stream.epoch == 1


def test_a_position_ahead_of_what_was_handed_out_is_found_by_reading(tmp_path):
    paths = write(tmp_path, numbered([3, 4, 5]))
    straight = FileStream(paths, global_batch=2)
    list(straight)
    for step in range(14):
        stream = FileStream(paths, global_batch=2)
        stream.advance_to(step)
        basis = {"basis": stream.state_at(step)["basis"] | {"records_per_epoch": 12}}
        assert stream.state_at(step) | basis == straight.state_at(step)
        assert list(stream) == list(resumed(paths, straight.state_at(step)))


def resumed(paths, saved):
    stream = FileStream(paths, global_batch=2)
    stream.load(saved)
    return stream


def test_resuming_reads_on_from_the_position_and_nothing_before_it(tmp_path):
    read = []

    def noted(file):
        read.append((os.path.basename(file.name), file.tell()))
        return file.readline()

    paths = write(tmp_path, numbered([1000] * 5))
    options = {"records": noted, "global_batch": 10, "shuffle_window": 20}
    stream = FileStream(paths, **options)
    places = itertools.islice(iter(stream.sampler), 4750)
    assert len(list(places)) == 4750
    stream.advance_to(475)
    saved = stored(stream.state_at(475))
    fresh = FileStream(paths, **options)
    read.clear()
    fresh.load(saved)
    assert read == []
    assert len(list(fresh)) == 250
    # Each of the rest was found once and read once, and the window's first half was found again.
    assert len(read) == 250 * 2 + 10
    assert min(read) == ("part-4.txt", saved["byte"])


def test_marks_that_were_given_up_are_found_again(tmp_path):
    paths = write(tmp_path, {"a": [b"%d" % at for at in range(10_000)]})
    stream = FileStream(paths, global_batch=1)
    list(stream)
    assert len(stream.sampler._marks) <= 4096
    assert stream.state_at(3)["byte"] == 6
    assert stream.state_at(9999)["record"] == 9999


def test_consumed_positions_are_forgotten(tmp_path):
    stream = FileStream(write(tmp_path, numbered([100])), global_batch=2)
    iterator = iter(stream)
    for step in range(1, 50):
        next(iterator), next(iterator)
        stream.advance_to(step)
        assert all(batch >= step for _, batch in stream.sampler._marks)


def test_a_changed_global_batch_is_taken_at_a_common_multiple(tmp_path):
    paths = write(tmp_path, numbered([30]))
    stream = FileStream(paths, global_batch=2, transform=lambda line: line)
    list(stream)
    saved = stream.state_at(6)
    fresh = FileStream(paths, global_batch=4)
    fresh.load(saved)
    assert next(iter(fresh)) == b"0.12"
    with pytest.raises(ConfigError, match="no multiple of the new global_batch=5"):
        FileStream(paths, global_batch=5).load(saved)


def test_what_is_no_position_is_refused(tmp_path):
    stream = FileStream(write(tmp_path, numbered([8])), global_batch=2)
    list(stream)
    saved = stream.state_at(1)
    for change in ({"record": -1}, {"byte": "0"}, {"file": None}, {"basis": None}, {"epoch": True}):
        with pytest.raises(StateMismatchError, match="not one of a FileStream"):
            stream.load(saved | change)
    for basis in ({"turn": "0"}, {"records_per_epoch": 1.5}, {"through": -1}):
        with pytest.raises(StateMismatchError, match="not one of a FileStream"):
            stream.load(saved | {"basis": saved["basis"] | basis})
    for change in ({"byte": 10_000}, {"record": 9}, {"in_window": 9}):
        with pytest.raises(StateMismatchError, match="no start of a record"):
            stream.load(saved | change)


# -- files that change --------------------------------------------------------------------------------------


def test_a_moved_folder_is_the_same_data(tmp_path):
    settings = []
    for name in ("here", "there"):
        write(tmp_path / name, {"x/a": [b"1"], "x/b": [b"2"]})
        settings.append(FileStream(str(tmp_path / name / "x" / "*"), global_batch=1).sampler.settings())
    assert settings[0] == settings[1]
    assert settings[0]["files"].startswith("2 files, 4 bytes, names and sizes ")


@pytest.mark.parametrize("change", [{"a": b"1\n2\n"}, {"c": b""}], ids=["another size", "another file"])
def test_changed_files_are_a_changed_setting(tmp_path, change):
    write(tmp_path, {"a": [b"1"], "b": [b"2"]})
    before = FileStream(str(tmp_path / "*"), global_batch=1).sampler.settings()
    write(tmp_path, change)
    after = FileStream(str(tmp_path / "*"), global_batch=1).sampler.settings()
    assert {name for name in before if before[name] != after[name]} == {"files"}


def test_files_may_be_added_or_changed_behind_the_position_only(tmp_path):
    paths = write(tmp_path, numbered([4, 4, 4]))
    stream = FileStream(paths, global_batch=2)
    list(stream)
    saved = stream.state_at(3)
    write(tmp_path, {"part-2.txt": [b"changed"], "part-3.txt": [b"added", b"too"]})
    fresh = FileStream(str(tmp_path / "*"), global_batch=1)
    fresh.load(saved)
    assert fresh.records_per_epoch is None
    assert list(fresh) == [b"1.2", b"1.3", b"changed", b"added", b"too"]
    write(tmp_path, {"part-0.txt": [b"longer than before"]})
    changed = FileStream(str(tmp_path / "*"), global_batch=1)
    with pytest.raises(
        ConfigError,
        match=r"record 2 of part-1.txt, which hangs on the first 2 files .* not the same any more",
    ):
        changed.load(saved)
    changed.load(stream.state_at(6))
    assert (changed.epoch, next(iter(changed))) == (1, b"longer than before")
    assert len(list(changed)) == 8
    assert (changed.epoch, changed.records_per_epoch) == (2, 8)


def test_a_shuffle_window_that_reaches_into_changed_files_is_refused(tmp_path):
    paths = write(tmp_path, numbered([4, 4, 4]))
    options = {"global_batch": 2, "shuffle_window": 6}
    stream = FileStream(paths, **options)
    list(stream)
    write(tmp_path, {"part-2.txt": [b"changed"]})
    FileStream(paths, **options).load(stream.state_at(1))
    with pytest.raises(ConfigError, match="hangs on the first 3 files"):
        FileStream(paths, **options).load(stream.state_at(4))


def test_a_short_shuffle_window_hangs_on_there_being_no_more_files(tmp_path):
    write(tmp_path, numbered([4, 5]))
    options = {"global_batch": 1, "shuffle_window": 6}
    stream = FileStream(str(tmp_path / "*"), **options)
    list(stream)
    FileStream(str(tmp_path / "*"), **options).load(stream.state_at(7))
    write(tmp_path, {"part-2.txt": [b"added"]})
    fresh = FileStream(str(tmp_path / "*"), **options)
    fresh.load(stream.state_at(5))
    with pytest.raises(ConfigError, match=r"record 2 of part-1.txt, which hangs on the first 3 files"):
        fresh.load(stream.state_at(7))


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shuffle_files": True}, {"shuffle_window": 3}, {"records": 4}], ids=str
)
def test_the_order_can_change_only_at_the_start_of_an_epoch(tmp_path, change):
    paths = write(tmp_path, {"a": [b"abc"] * 4})
    stream = FileStream(paths, global_batch=2)
    list(stream)
    changed = FileStream(paths, **({"global_batch": 2} | change))
    with pytest.raises(ConfigError, match="can change only at the start of an epoch"):
        changed.load(stream.state_at(1))
    changed.load(stream.state_at(2))
    assert (changed.epoch, len(list(changed))) == (1, 4)


def test_a_file_that_vanished_is_an_error_that_names_it(tmp_path):
    paths = write(tmp_path, numbered([2, 2]))
    stream = FileStream(paths, global_batch=2)
    paths[1].unlink()
    with pytest.raises(
        StorageUnavailableError, match=r"cannot read .*part-1.txt at byte 0: No such file"
    ) as caught:
        list(stream)
    assert caught.value.path == str(paths[1])


@pytest.mark.parametrize(
    "records", ["lines", 2, lambda file: file.readline()], ids=["lines", "fixed", "splitter"]
)
def test_a_file_that_became_shorter_is_an_error_that_names_it(tmp_path, records):
    paths = write(tmp_path, {"a": b"1\n" * 4})
    stream = FileStream(paths, records=records, global_batch=1)
    paths[0].write_bytes(b"1\n")
    with pytest.raises((CorruptionError, ConfigError), match=f"{paths[0]}"):
        list(stream)


def test_a_file_whose_records_changed_during_the_run_is_found_at_the_end_of_the_epoch(tmp_path):
    paths = write(tmp_path, {"a": b"1\n2\n3\n4\n"})
    stream = FileStream(paths, global_batch=1)
    list(stream)
    paths[0].write_bytes(b"1\n22234\n")
    with pytest.raises(CorruptionError, match="held 4 records in an earlier epoch and hold 2 now"):
        list(stream)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [], "empty"),
        (lambda folder: folder / "none.txt", "none.txt: No such file"),
        (lambda folder: str(folder / "*.json"), "no file matches"),
        (lambda folder: folder, r"is no regular file; give its files, such as '.*/\*'"),
        (lambda folder: folder / "packed.txt.gz", "is compressed"),
    ],
    ids=["nothing", "missing", "no match", "folder", "compressed"],
)
def test_files_that_cannot_be_streamed_are_refused_at_once(tmp_path, make, message):
    write(tmp_path, {"a.txt": [b"1"], "packed.txt.gz": b"\x1f\x8b"})
    with pytest.raises(ConfigError, match=message):
        FileStream(make(tmp_path), global_batch=1)


def test_an_existing_path_is_never_taken_for_a_pattern(tmp_path):
    paths = write(tmp_path, {"a[1].txt": [b"1"], "a1.txt": [b"2"]})
    assert list(FileStream(paths[0], global_batch=1)) == [b"1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": True}, "global_batch must be"),
        ({"global_batch": 0}, "global_batch must be an integer of at least 1"),
        ({"global_batch": 1, "shuffle_window": -1}, "shuffle_window must be"),
        ({"global_batch": 1, "batch_size": 0}, "batch_size must be"),
        ({"global_batch": 1, "records": "words"}, "records must be"),
        ({"global_batch": 1, "records": True}, "records must be"),
        ({"global_batch": 1, "records": 3}, "no multiple of records of 3 bytes"),
        ({"global_batch": 1, "rank": 1}, "both rank and world_size"),
        ({"global_batch": 2, "rank": 2, "world_size": 2}, "rank=2 is not in"),
        ({"global_batch": 3, "rank": 0, "world_size": 2}, "cannot be divided"),
        ({"global_batch": 9, "records": 2}, "hold 2 records, less than global_batch=9"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        FileStream(write(tmp_path, {"a": b"1\n2\n"}), **options)


def test_too_few_lines_for_a_global_batch_are_refused_when_they_are_counted(tmp_path):
    with pytest.raises(ConfigError, match="hold 2 records, less than global_batch=9"):
        list(FileStream(write(tmp_path, {"a": b"1\n2\n"}), global_batch=9))


# -- transforms, copies -------------------------------------------------------------------------------------


def test_draws_of_a_transform_depend_on_seed_epoch_and_position_alone(tmp_path):
    def noisy(line):
        return line, torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002

    paths = write(tmp_path, numbered([5, 5]))
    before = context.encode(rng.capture_rng())
    stream = FileStream(paths, global_batch=2, transform=noisy)
    first, second = list(stream), list(stream)
    assert context.encode(rng.capture_rng()) == before
    torch.rand(3)
    again = FileStream(paths, global_batch=2, transform=noisy)
    again.load(stored(stream.state_at(2)))
    assert list(again) == first[4:]
    assert not {noise for _, *noises in first for noise in noises} & {
        noise for _, *noises in second for noise in noises
    }
    assert list(FileStream(paths, global_batch=2, seed=1, transform=noisy)) != first


def test_a_stream_travels_to_another_process_with_its_position(tmp_path):
    paths = write(tmp_path, numbered([5, 5]))
    stream = FileStream(paths, global_batch=2, transform=int_of)
    list(stream)
    stream.advance_to(2)
    copy = pickle.loads(pickle.dumps(stream))
    assert copy.state_at(2) == stream.state_at(2)
    assert batches([copy]) == batches([stream])


def int_of(line):
    return int(line.replace(b".", b""))


def test_the_name_is_public():
    assert relight.FileStream is FileStream


def test_a_forked_process_opens_files_of_its_own(tmp_path):
    (path,) = write(tmp_path, {"a": b"abcdef"})
    files = stream_records.OpenFiles()
    file = files.get(str(path))
    child = os.fork()
    if not child:
        # Positions of inherited files are shared.
        os.lseek(files.get(str(path)).fileno(), 3, os.SEEK_SET)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0
    assert files.get(str(path)) is file


def test_only_so_many_files_stay_open(tmp_path):
    paths = [str(path) for path in write(tmp_path, dict.fromkeys("abcd", b"1"))]
    files = stream_records.OpenFiles(limit=2)
    opened = [files.get(path) for path in paths]
    assert [file.closed for file in opened] == [True, True, False, False]
    assert files.get(paths[0]) is not opened[0]


def test_a_warm_start_moves_the_count_of_steps_and_not_the_position(tmp_path):
    paths = write(tmp_path, numbered([5, 5]))
    stream = FileStream(paths, global_batch=2)
    stream.advance_to(3)
    before = stream.state_at(3)
    stream.sampler.rebase(0)
    assert stream.state_at(0) == before | {"step": 0}
    assert stream.files == tuple(map(str, paths))
    assert next(iter(stream)) == b"1.1"
