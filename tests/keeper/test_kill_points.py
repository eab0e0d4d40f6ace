from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import pytest

from relight.errors import KeeperUnavailableError
from relight.keeper.drain import POINTS
from relight.keeper.messages import TierPlan
from relight.keeper.process import ensure_keeper
from relight.manifest.catalog import POINTS as CATALOG_POINTS

pytestmark = pytest.mark.multiprocess

KILLER = """
import os, signal, sys
from relight import stages
from relight.keeper.__main__ import main

def kill(point, wanted=sys.argv.pop(1)):
    if point == wanted:
        os.kill(os.getpid(), signal.SIGKILL)

stages.subscribe(kill)
main()
"""

NEVER_IN_A_GOOD_SAVE = {"drain.failed", "drain.partial_removed", "catalog.generation_claimed"}


@pytest.mark.parametrize(
    "point",
    sorted({*POINTS, *CATALOG_POINTS, "seal.digests_written"} - NEVER_IN_A_GOOD_SAVE),
)
def test_killed_at_any_point_the_next_keeper_finishes(run, eventually, is_gone, point: str) -> None:
    run.claim()
    tiers = (TierPlan(url=run.root_url, keep=1),)
    before = ensure_keeper(run.folder, run.root_url, argv_prefix=[sys.executable, "-c", KILLER, point])
    before.attach(run.attach_request(tiers=tiers))
    pid = before.health().pid
    for step, index in ((5, 0), (10, 1)):
        run.seal(step, index=index)
    with suppress(KeeperUnavailableError):
        before.seal(0, 0)
        before.seal(0, 1)
    eventually(lambda: is_gone(pid))
    before.close()
    after = ensure_keeper(run.folder, run.root_url)
    try:
        after.attach(run.attach_request(tiers=tiers))
        assert after.wait(10, 1, timeout_seconds=20).state in ("committed", "verified")
        eventually(lambda: run.catalog().is_verified(10, 1))
        eventually(lambda: [info.step for info in run.catalog().committed()] == [10])
        assert run.catalog().verify(10, 1) == []
        eventually(lambda: not list(run.catalog().backend.unfinished()))
    finally:
        pid = after.health().pid
        after.close()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: is_gone(pid))
