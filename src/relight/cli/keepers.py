"""`relight save` and `relight keeper`: talking to the processes that hold snapshots in this node's memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relight.cli.exits import OK, warn
from relight.cli.runs import print_json, print_table
from relight.errors import ConfigError, KeeperUnavailableError, RelightError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relight.keeper.client import KeeperClient
    from relight.keeper.messages import KeeperStatus

__all__ = ["clean", "save", "status", "steps_in_memory", "stop"]


def save(url: str, /) -> int:
    """Ask a running training for a checkpoint at its next step; returns at once.

    Args:
        url: Root of the run, as its training script names it. The training must run on this machine.
    """
    client = _keeper_of(url)
    if not any(rank.is_alive for rank in client.status().ranks):
        raise KeeperUnavailableError(
            f"no training is attached to the keeper of {url}; nothing can save now", path=url
        )
    count = client.request_save()
    print(
        f"asked for a save at the next step (request {count}); `relight ls {url}` shows it when it is committed"
    )
    return OK


def status(url: str | None = None, /, *, json: bool = False) -> int:
    """Show the keepers: who holds snapshots in this machine's memory, and what is still to be stored.

    Args:
        url: Root of a run; default: all keepers.
        json: Print JSON instead of text.
    """
    import msgspec

    clients = [_keeper_of(url)] if url is not None else [client for _, client in _keepers()]
    found = []
    for client in clients:
        try:
            found.append(client.status())
        except KeeperUnavailableError as error:
            warn(str(error))
    if json:
        print_json([msgspec.to_builtins(one) for one in found])
        return OK
    for one in found:
        _print_status(one)
    if not found:
        print("no keeper is running")
    return OK


def stop(url: str, /, *, drain: bool = True) -> int:
    """Stop the keeper of a run.

    Args:
        url: Root of the run.
        drain: Store all sealed snapshots first; with --no-drain they stay in memory for the next keeper.
    """
    client = _keeper_of(url)
    pid = client.health().pid
    client.stop(drain=drain)
    print(f"keeper {pid} stops{' once everything is stored' if drain else ''}")
    return OK


def clean(url: str | None = None, /, *, force: bool = False) -> int:
    """Free the shared memory of runs whose keeper is gone.

    Args:
        url: Root of a run; default: all runs of this user.
        force: Also where snapshots were sealed that may not be stored anywhere.
    """
    from relight.units import format_bytes

    freed_bytes = 0
    for folder in _folders(url):
        freed_bytes += _clean_folder(folder, force=force)
    print(f"freed {format_bytes(freed_bytes)} of shared memory")
    return OK


def steps_in_memory(url: str) -> dict[tuple[int, int], int]:
    """Return (step, generation) -> number of ranks whose snapshot of it this node's memory holds."""
    counts: dict[tuple[int, int], int] = {}
    try:
        for _, client in _keepers(url):
            for slot in client.status().slots:
                if slot.state == "digested":
                    key = (slot.step, slot.generation)
                    counts[key] = counts.get(key, 0) + 1
    except RelightError:
        # A keeper that does not answer holds nothing that could be read.
        return {}
    return counts


def _base() -> Path:
    return Path(os.environ.get("RELIGHT_ARENA_DIR", "/dev/shm")) / f"relight-{os.getuid()}"  # noqa: S108


def _keepers(url: str | None = None) -> Iterator[tuple[str, KeeperClient]]:
    """Yield (root, client) of the keepers that have published themselves, or of the one of `url`."""
    import msgspec

    from relight.keeper.client import KeeperClient
    from relight.keeper.process import KeeperFile
    from relight.storage.tiers import tier_url

    wanted = None if url is None else tier_url(url)
    for path in sorted(_base().glob("*/keeper.json")):
        try:
            said = msgspec.json.decode(path.read_bytes(), type=KeeperFile)
        except (OSError, msgspec.MsgspecError):
            continue
        if wanted in (None, said.root):
            yield said.root, KeeperClient(path.parent, timeout_seconds=5.0)


def _keeper_of(url: str) -> KeeperClient:
    for _, client in _keepers(url):
        client.health()
        return client
    raise KeeperUnavailableError(
        f"no keeper of {url} runs on this machine; start the training, or run this where it runs", path=url
    )


def _folders(url: str | None) -> list[Path]:
    from relight.keeper.arena import arena_dir
    from relight.storage.tiers import tier_url

    if url is not None:
        return [arena_dir(tier_url(url))]
    return sorted(path for path in _base().glob("*") if path.is_dir())


def _clean_folder(folder: Path, *, force: bool) -> int:
    """Remove the slots of a run without a keeper; return the bytes that were freed."""
    from relight.keeper.arena import ArenaSlot, SlotState, check_private, list_slots
    from relight.keeper.process import hold_lock, remove_folder

    check_private(folder)
    freed_bytes = 0
    with hold_lock(folder / "keeper.lock") as is_held:
        if not is_held:
            warn(f"{folder}: its keeper is running; `relight keeper stop` first")
            return 0
        for path in list_slots(folder):
            if not force:
                try:
                    with ArenaSlot.open(path) as slot:
                        is_sealed = slot.control().state in (SlotState.SEALED, SlotState.DIGESTED)
                except RelightError:
                    is_sealed = False
                if is_sealed:
                    raise ConfigError(
                        f"{path} holds a sealed snapshot that may not be stored; start the training to store it, or "
                        "clean with --force",
                        path=str(path),
                    )
            freed_bytes += path.stat().st_blocks * 512
            path.unlink()
        remove_folder(folder)
    return freed_bytes


def _print_status(one: KeeperStatus) -> None:
    from relight.units import format_bytes

    alive = sum(rank.is_alive for rank in one.ranks)
    print(f"{one.health.root}: keeper {one.health.pid}, {alive} of {len(one.ranks)} ranks alive")
    rows = [
        [
            str(s.rank),
            str(s.slot),
            s.state,
            str(s.step),
            format_bytes(s.image_bytes),
            "yes" if s.is_drained else "no",
        ]
        for s in one.slots
    ]
    if rows:
        print_table(
            ["rank", "slot", "state", "step", "size", "stored"], rows, right=["rank", "slot", "step", "size"]
        )
    steps: list[list[Any]] = [
        [str(step.step), str(step.generation), tier.url, tier.state, tier.message or ""]
        for step in one.steps
        for tier in step.tiers
    ]
    if steps:
        print_table(["step", "generation", "tier", "state", "message"], steps, right=["step", "generation"])
    for failure in one.errors:
        print(f"error: step {failure.step}: {failure.message}")
