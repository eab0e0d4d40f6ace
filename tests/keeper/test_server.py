from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relight.errors import ConfigError, CopyError, KeeperUnavailableError
from relight.keeper.arena import ArenaSlot, SlotState, arena_dir, list_slots, slot_path
from relight.keeper.client import KeeperClient, socket_path
from relight.keeper.messages import TierPlan
from relight.keeper.process import EXIT_BUSY, KeeperFile, ensure_keeper, linger_seconds_from, trim_log
from relight.keeper.server import EXIT_NOT_DRAINED

pytestmark = pytest.mark.multiprocess

StartKeeper = Callable[..., KeeperClient]

TRAINER = """
import os, sys, time
import msgspec
from pathlib import Path
from relight.keeper.arena import ArenaSlot, slot_path
from relight.keeper.client import KeeperClient
from relight.keeper.messages import AttachRequest, TierPlan
from relight.manifest.manifest import RecordDraft

folder, root, step, do = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].split(",")
client = KeeperClient(folder)
client.attach(AttachRequest(rank=0, world_size=1, pid=os.getpid(), tiers=(TierPlan(url=root),), generation=1,
                            run="sample-run"))
index = client.acquire(0, timeout_seconds=10)
path = slot_path(folder, 0, index)
size = 2**20
slot = ArenaSlot.open(path) if path.exists() else ArenaSlot.create(path, size, owner_pid=os.getpid())
slot.begin(step=step, generation=1, rank=0, world_size=1, image_bytes=size, run="sample-run")
slot.image[:] = bytes([step % 256]) * size
if "seal" in do:
    draft = RecordDraft(run="sample-run", step=step, generation=1, parent=None, rank=0, world_size=1, layout="x",
                        image_bytes=size, saved_at=1.0, context=msgspec.Raw(b"{}"))
    slot.seal(msgspec.json.encode(draft), sealed_at=time.time())
if "tell" in do:
    client.seal(0, index)
print(index, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def trainer(run):
    """Start a rank in a process of its own that does what it is told, then waits."""
    started: list[subprocess.Popen[str]] = []

    def start(step: int, do: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", TRAINER, str(run.folder), run.root_url, str(step), do]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def leave(client: KeeperClient) -> None:
    client.detach(0, pid=os.getpid(), clean=True)


def save(run, client: KeeperClient, step: int, **options: int) -> int:
    index = client.acquire(options.get("rank", 0), timeout_seconds=10)
    assert index is not None
    run.seal(step, index=index, **options)
    client.seal(options.get("rank", 0), index)
    return index


# Finding and starting.


def test_many_starters_at_once_find_one_keeper(run, start_keeper: StartKeeper) -> None:
    code = (
        "import sys; from pathlib import Path; from relight.keeper.process import ensure_keeper\n"
        "print(ensure_keeper(Path(sys.argv[1]), sys.argv[2]).health().pid)"
    )
    argv = [sys.executable, "-c", code, str(run.folder), run.root_url]
    starters = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    pids = {int(starter.communicate(timeout=40)[0]) for starter in starters}
    assert pids == {start_keeper().health().pid}
    assert [starter.returncode for starter in starters] == [0] * 6


def test_threads_of_one_process_find_one_keeper(run, start_keeper: StartKeeper) -> None:
    pids: list[int] = []

    def find() -> None:
        client = ensure_keeper(run.folder, run.root_url)
        pids.append(client.health().pid)
        client.close()

    threads = [threading.Thread(target=find) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert pids == [start_keeper().health().pid] * 4


def test_what_is_published_names_the_keeper(run, start_keeper: StartKeeper) -> None:
    import msgspec

    health = start_keeper().health()
    found = msgspec.json.decode((run.folder / "keeper.json").read_bytes(), type=KeeperFile)
    assert (found.pid, found.root, found.version) == (health.pid, run.root_url, health.version)
    assert socket_path(run.folder).stat().st_mode & 0o777 == 0o600


def test_the_keeper_is_no_child_and_inherits_nothing(run, start_keeper: StartKeeper, tmp_path: Path) -> None:
    marker = (tmp_path / "marker").open("w")
    os.set_inheritable(marker.fileno(), True)
    pid = start_keeper().health().pid
    marker.close()
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    assert int(fields[1]) != os.getpid()
    assert int(fields[3]) not in (os.getsid(0), 0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    held = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    assert str(tmp_path / "marker") not in held
    assert [held.count(str(run.folder / "keeper.log")), held.count("/dev/null")] == [2, 1]


def test_what_a_killed_keeper_left_is_cleared_away(
    run, start_keeper: StartKeeper, eventually, is_gone
) -> None:
    first = start_keeper().health().pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: is_gone(first))
    assert socket_path(run.folder).exists()
    second = start_keeper().health().pid
    assert second != first


def test_a_second_keeper_by_hand_sees_that_one_is_there(run, start_keeper: StartKeeper) -> None:
    start_keeper()
    argv = [sys.executable, "-m", "relight.keeper", "--folder", str(run.folder), "--root", run.root_url]
    assert subprocess.run([*argv, "--foreground"], timeout=30, check=False).returncode == EXIT_BUSY
    assert subprocess.run(argv, timeout=30, check=False).returncode == EXIT_BUSY


def test_a_keeper_that_cannot_start_says_why(run) -> None:
    code = "import sys; print('the roof is on fire', file=sys.stderr); sys.exit(7)"
    with pytest.raises(KeeperUnavailableError, match=r"(?s)code 7.*the roof is on fire"):
        ensure_keeper(run.folder, run.root_url, argv_prefix=[sys.executable, "-c", code])


def test_a_keeper_that_hangs_at_its_start_is_ended(run) -> None:
    code = "import time; print('pid', flush=True); time.sleep(600)"
    with pytest.raises(KeeperUnavailableError, match="did not start in time"):
        ensure_keeper(run.folder, run.root_url, argv_prefix=[sys.executable, "-c", code], timeout_seconds=0.5)


def test_a_command_that_is_not_there_is_named(run) -> None:
    with pytest.raises(KeeperUnavailableError, match="no-such-command"):
        ensure_keeper(run.folder, run.root_url, argv_prefix=["/no-such-command"])


def test_a_relative_root_is_refused(run) -> None:
    with pytest.raises(ConfigError, match="relative"):
        ensure_keeper(run.folder, "runs/gpt")


def test_a_keeper_of_another_root_is_refused(run, start_keeper: StartKeeper) -> None:
    start_keeper()
    with pytest.raises(ConfigError, match="serves"):
        ensure_keeper(run.folder, "/another/root")


def test_a_long_path_works(shared: Path, tmp_path: Path) -> None:
    base = shared / ("x" * 120)
    base.mkdir(mode=0o700)
    folder = arena_dir(str(tmp_path), base=base)
    client = ensure_keeper(folder, str(tmp_path))
    assert client.health().root == str(tmp_path)
    client.stop(drain=True)
    client.close()


def test_an_arena_that_was_removed_is_made_again(run, start_keeper: StartKeeper) -> None:
    run.folder.rmdir()
    assert start_keeper().health().root == run.root_url
    assert run.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("text", "seconds"), [(None, 600.0), ("5", 5.0), ("0", 0.0), ("1.5", 1.5)])
def test_linger_comes_from_the_environment(text: str | None, seconds: float) -> None:
    assert linger_seconds_from({} if text is None else {"RELIGHT_KEEPER_LINGER_SECONDS": text}) == seconds


@pytest.mark.parametrize("text", ["", "ten", "-1", "nan", "inf"])
def test_linger_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="RELIGHT_KEEPER_LINGER_SECONDS"):
        linger_seconds_from({"RELIGHT_KEEPER_LINGER_SECONDS": text})


def test_a_log_that_grows_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "keeper.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"x" * 2**20 + b"the end\n")
        trim_log(path)
        log.write(b"and on\n")
    assert path.stat().st_size == 2**18 + 7
    assert path.read_bytes().endswith(b"the end\nand on\n")


def test_an_idle_keeper_is_small(start_keeper: StartKeeper) -> None:
    pid = start_keeper().health().pid
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {
        line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "RssShmem"))
    }
    assert (sizes["VmRSS"] - sizes["RssShmem"]) * 1024 < 64 * 2**20


# Slots.


def test_a_save_becomes_durable(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    save(run, client, 5)
    assert client.wait(5, 1, timeout_seconds=20).state in ("committed", "verified")
    assert run.catalog().verify(5, 1) == []
    leave(client)


def test_the_newest_complete_snapshot_is_never_lent(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    first = save(run, client, 5)
    client.wait(5, 1, timeout_seconds=20)
    second = save(run, client, 10)
    assert second != first
    client.wait(10, 1, timeout_seconds=20)
    assert client.acquire(0, timeout_seconds=5) == first
    assert client.acquire(0, timeout_seconds=0.05) is None
    leave(client)


def test_a_step_is_complete_in_memory_when_every_rank_is(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    # One process is one rank, so another one that lives stands for rank 1.
    for rank, pid in ((0, os.getpid()), (1, os.getppid())):
        client.attach(run.attach_request(rank=rank, world_size=2, pid=pid))
    for rank in (0, 1):
        save(run, client, 5, rank=rank, world_size=2)
    newer = save(run, client, 10, rank=0, world_size=2)
    assert client.wait(5, 1, timeout_seconds=20).state in ("committed", "verified")
    # Rank 1 has no step 10, so step 5 stays on both, and rank 0 may only give up its step 10.
    assert client.acquire(0, timeout_seconds=10) == newer
    kept = {(one.rank, one.step) for one in client.inventory()}
    assert kept >= {(0, 5), (1, 5)}
    for rank, pid in ((0, os.getpid()), (1, os.getppid())):
        client.detach(rank, pid=pid, clean=True)


def test_a_snapshot_that_is_not_stored_yet_is_never_lent(
    run, start_keeper: StartKeeper, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the run's directory should be")
    client = start_keeper()
    client.attach(run.attach_request(tiers=(TierPlan(url=str(blocked / "run")),)))
    first = save(run, client, 5)
    second = save(run, client, 10)
    assert {first, second} == {0, 1}
    started = time.monotonic()
    assert client.acquire(0, timeout_seconds=0.3) is None
    assert time.monotonic() - started >= 0.3
    blocked.unlink()
    # Step 10 is the newest complete one; step 5 may go once it is stored.
    assert client.acquire(0, timeout_seconds=20) == first
    leave(client)


def test_more_slots_are_lent_to_who_asks(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    lent = {client.acquire(0, timeout_seconds=0, num_slots=3) for _ in range(3)}
    assert lent == {0, 1, 2}
    assert client.acquire(0, timeout_seconds=0, num_slots=3) is None
    with pytest.raises(ConfigError, match="num_slots"):
        client.acquire(0, timeout_seconds=0, num_slots=1)
    leave(client)


def test_a_slot_of_another_size_is_removed_before_it_is_lent(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    index = client.acquire(0, timeout_seconds=5, capacity_bytes=1000)
    ArenaSlot.create(slot_path(run.folder, 0, index), 1000, owner_pid=os.getpid()).close()
    client.release(0, index)
    assert client.acquire(0, timeout_seconds=5, capacity_bytes=1000) == index
    assert slot_path(run.folder, 0, index).exists()
    client.release(0, index)
    assert client.acquire(0, timeout_seconds=5, capacity_bytes=2000) == index
    assert not slot_path(run.folder, 0, index).exists()
    leave(client)


def test_a_dropped_snapshot_frees_its_slot(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    index = client.acquire(0, timeout_seconds=5)
    slot = run.write(5, index=index)
    client.release(0, index)
    with run.open(slot) as mapped:
        assert mapped.control().state is SlotState.FREE
    with pytest.raises(ConfigError, match="not lent"):
        client.release(0, index)
    leave(client)


def test_a_sealed_slot_is_not_released(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    index = client.acquire(0, timeout_seconds=5)
    run.seal(5, index=index)
    with pytest.raises(ConfigError, match=r"sealed|not lent"):
        client.release(0, index)
    leave(client)


def test_only_a_sealed_slot_is_taken_in(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    with pytest.raises(CopyError):
        client.seal(0, 0)
    index = client.acquire(0, timeout_seconds=5)
    run.write(5, index=index)
    with pytest.raises(CopyError, match="WRITING"):
        client.seal(0, index)
    leave(client)


def test_a_rank_that_is_not_attached_gets_no_slot(start_keeper: StartKeeper) -> None:
    with pytest.raises(ConfigError, match="not attached"):
        start_keeper().acquire(0, timeout_seconds=0)


def test_wrong_attachments_are_refused(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    with pytest.raises(ConfigError, match="does not run here"):
        client.attach(run.attach_request(pid=2**22 + 1))
    with pytest.raises(ConfigError, match=r"not in 0\.\.0"):
        client.attach(run.attach_request(rank=1))
    with pytest.raises(ConfigError, match="relative"):
        client.attach(run.attach_request(tiers=(TierPlan(url="runs/x"),)))
    with pytest.raises(ConfigError, match="at least 1"):
        client.attach(run.attach_request(tiers=(TierPlan(url="/x", keep=0),)))


def test_ranks_with_other_tiers_are_refused(run, start_keeper: StartKeeper, trainer) -> None:
    client = start_keeper()
    trainer(5, "")
    with pytest.raises(ConfigError, match="the same on every rank"):
        client.attach(run.attach_request(rank=1, world_size=2, tiers=(TierPlan(url="/elsewhere"),)))


def test_a_requested_save_is_seen_without_a_call(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    with client.requests_path.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) as seen:
        assert int.from_bytes(seen[:8], "little") == 0
        assert [client.request_save(), client.request_save()] == [1, 2]
        assert int.from_bytes(seen[:8], "little") == 2
    assert client.attach(run.attach_request()).num_save_requests == 2
    leave(client)


# Death and departure.


def test_a_snapshot_outlives_the_worker_that_was_killed_before_it_told(
    run, start_keeper: StartKeeper, trainer
) -> None:
    client = start_keeper()
    worker = trainer(5, "seal")
    worker.kill()
    worker.wait()
    assert client.wait(5, 1, timeout_seconds=20).state in ("committed", "verified")
    assert [(one.step, one.rank) for one in client.inventory()] == [(5, 0)]


def test_a_snapshot_that_its_worker_never_finished_frees_the_slot(
    run, start_keeper: StartKeeper, trainer
) -> None:
    client = start_keeper()
    worker = trainer(5, "")
    worker.kill()
    worker.wait()
    client.attach(run.attach_request())
    assert client.acquire(0, timeout_seconds=10) == 0
    leave(client)


def test_the_inventory_waits_for_digests(run, start_keeper: StartKeeper) -> None:
    client = start_keeper()
    run.seal(5, index=0)
    run.seal(10, index=1)
    assert [(one.slot, one.step, one.generation, one.world_size) for one in client.inventory()] == [
        (0, 5, 1, 1),
        (1, 10, 1, 1),
    ]


def test_a_keeper_that_is_killed_is_replaced_and_drains_again(
    run, start_keeper: StartKeeper, trainer
) -> None:
    blocked = run.root
    blocked.write_text("a file where the run's directory should be")
    first = start_keeper("--retry", "600")
    worker = trainer(5, "seal,tell")
    assert first.wait(5, 1, timeout_seconds=0.2).state in ("draining", "digested", "sealed")
    os.kill(first.health().pid, signal.SIGKILL)
    worker.kill()
    worker.wait()
    blocked.unlink()
    second = start_keeper()
    assert second.wait(5, 1, timeout_seconds=20).state in ("committed", "verified")
    assert run.catalog().verify(5, 1) == []


def test_a_client_goes_on_with_the_next_keeper(run, start_keeper: StartKeeper, eventually, is_gone) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    save(run, client, 5)
    client.wait(5, 1, timeout_seconds=20)
    pid = client.health().pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid))
    with pytest.raises(KeeperUnavailableError):
        client.status()
    start_keeper()
    assert [one.rank for one in client.status().ranks] == [0]
    assert client.wait(5, 1, timeout_seconds=5).state in ("committed", "verified")
    leave(client)


def test_a_keeper_leaves_once_all_left_cleanly(run, start_keeper: StartKeeper, eventually, is_gone) -> None:
    client = start_keeper()
    client.attach(run.attach_request())
    save(run, client, 5)
    leave(client)
    pid = client.health().pid
    eventually(lambda: is_gone(pid) and not run.folder.exists())
    assert run.catalog().is_verified(5, 1)


def test_a_keeper_outlives_lost_workers_for_a_while(
    run, start_keeper: StartKeeper, trainer, eventually, is_gone
) -> None:
    client = start_keeper(linger_seconds=2.0)
    worker = trainer(5, "seal,tell")
    pid = client.health().pid
    worker.kill()
    worker.wait()
    assert client.wait(5, 1, timeout_seconds=10).state in ("committed", "verified")
    assert [one.step for one in client.inventory()] == [5]
    eventually(lambda: is_gone(pid) and not run.folder.exists())


def test_a_keeper_that_lingers_gives_a_failed_step_one_more_try(
    run, start_keeper: StartKeeper, trainer, eventually, is_gone
) -> None:
    run.root.write_text("a file where the run's directory should be")
    client = start_keeper("--retry", "0", linger_seconds=2.0)
    worker = trainer(5, "seal,tell")
    assert client.wait(5, 1, timeout_seconds=10).state == "failed"
    pid = client.health().pid
    worker.kill()
    worker.wait()
    run.root.unlink()
    eventually(lambda: is_gone(pid) and not run.folder.exists())
    assert run.catalog().is_committed(5, 1)


def test_a_new_worker_ends_the_lingering(run, start_keeper: StartKeeper, trainer, eventually) -> None:
    client = start_keeper(linger_seconds=1.5)
    worker = trainer(5, "seal,tell")
    worker.kill()
    worker.wait()
    client.attach(run.attach_request(generation=2))
    eventually(lambda: [one.pid for one in client.status().ranks] == [os.getpid()])
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert not client.health().is_stopping
        time.sleep(0.05)
    leave(client)


def test_asked_to_stop_at_once_it_leaves_the_slots(
    run, start_keeper: StartKeeper, eventually, is_gone
) -> None:
    client = start_keeper()
    pid = client.health().pid
    run.seal(5)
    client.stop(drain=False)
    eventually(lambda: is_gone(pid))
    assert [path.name for path in list_slots(run.folder)] == ["rank-00000.slot-0"]
    assert not socket_path(run.folder).exists()
    assert not (run.folder / "keeper.json").exists()


def test_asked_to_stop_after_draining_it_leaves_nothing(
    run, start_keeper: StartKeeper, eventually, is_gone
) -> None:
    client = start_keeper()
    pid = client.health().pid
    run.seal(5)
    client.inventory()
    client.stop(drain=True)
    eventually(lambda: is_gone(pid) and not run.folder.exists())
    assert run.catalog().is_committed(5, 1)


def keeper_in_front(run, *options: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "relight.keeper", "--folder", str(run.folder), "--root", run.root_url]
    return subprocess.Popen([*argv, "--foreground", *options], stderr=subprocess.PIPE)


def test_sigterm_drains_what_is_sealed(run, eventually) -> None:
    run.seal(5)
    process = keeper_in_front(run)
    eventually(lambda: socket_path(run.folder).exists())
    eventually(lambda: not process.poll() and _is_up(run))
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"the newest complete step is stored" in log
    assert run.catalog().is_committed(5, 1)


def test_sigterm_says_when_it_did_not_make_it(run, eventually) -> None:
    run.root.write_text("a file where the run's directory should be")
    run.seal(5)
    process = keeper_in_front(run, "--grace", "0.5")
    eventually(lambda: _is_up(run))
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == EXIT_NOT_DRAINED
    assert b"could not be stored in time" in log
    assert [path.name for path in list_slots(run.folder)] == ["rank-00000.slot-0"]


def _is_up(run) -> bool:
    client = KeeperClient(run.folder)
    try:
        return client.health().root == run.root_url
    except KeeperUnavailableError:
        return False
    finally:
        client.close()
