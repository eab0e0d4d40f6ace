from __future__ import annotations

import pytest

from relight.keeper.arena import SlotControl, SlotState
from relight.keeper.slots import SlotFact, SlotId, StepKey, choose_slot, newest_complete

FREE, WRITING, SEALED, DIGESTED = SlotState.FREE, SlotState.WRITING, SlotState.SEALED, SlotState.DIGESTED


def fact(
    rank: int,
    index: int,
    state: SlotState | None,
    step: int = 0,
    *,
    generation: int = 1,
    world_size: int = 1,
    run: int = 7,
    is_leased: bool = False,
    is_drained: bool = True,
) -> SlotFact:
    control = None
    if state is not None:
        control = SlotControl(
            state=state,
            step=step,
            generation=generation,
            rank=rank,
            world_size=world_size,
            image_bytes=1,
            capacity_bytes=1,
            record_bytes=1,
            run_digest=run,
            owner_pid=1,
            num_blocks=1,
            sealed_at=0.0,
        )
    return SlotFact(slot=SlotId(rank, index), control=control, is_leased=is_leased, is_drained=is_drained)


def chosen(*facts: SlotFact, num_slots: int = 2, run: int | None = 7) -> int | None:
    return choose_slot(facts, rank=0, num_slots=num_slots, run=run)[0]


def test_nothing_is_complete_at_first() -> None:
    assert newest_complete([], None) is None


def test_a_step_is_complete_when_every_rank_has_digests() -> None:
    facts = [fact(0, 0, DIGESTED, 5, world_size=2), fact(1, 0, SEALED, 5, world_size=2)]
    assert newest_complete(facts, None) is None
    facts[1] = fact(1, 0, DIGESTED, 5, world_size=2)
    assert newest_complete(facts, None) == StepKey(1, 5, 7)


def test_the_newest_is_by_generation_and_then_by_step() -> None:
    facts = [fact(0, 0, DIGESTED, 900, generation=1), fact(0, 1, DIGESTED, 20, generation=2)]
    assert newest_complete(facts, None) == StepKey(2, 20, 7)


def test_another_runs_snapshot_is_not_the_newest() -> None:
    facts = [fact(0, 0, DIGESTED, 900, run=1), fact(0, 1, DIGESTED, 20)]
    assert newest_complete(facts, 7) == StepKey(1, 20, 7)


def test_a_lent_slot_can_not_be_read() -> None:
    assert newest_complete([fact(0, 0, DIGESTED, 5, is_leased=True)], None) is None


@pytest.mark.parametrize(
    ("facts", "index"),
    [
        ([], 0),
        ([fact(0, 0, FREE)], 0),
        ([fact(0, 0, FREE, is_leased=True)], 1),
        ([fact(0, 0, None, is_leased=True)], 1),
        ([fact(0, 0, WRITING), fact(0, 1, FREE)], 1),
        ([fact(0, 0, DIGESTED, 5), fact(0, 1, FREE)], 1),
        ([fact(0, 0, DIGESTED, 5)], 1),
        ([fact(0, 0, DIGESTED, 5), fact(0, 1, DIGESTED, 10)], 0),
        ([fact(0, 0, DIGESTED, 10), fact(0, 1, DIGESTED, 5)], 1),
        ([fact(0, 0, DIGESTED, 10), fact(0, 1, DIGESTED, 5, is_drained=False)], None),
        ([fact(0, 0, DIGESTED, 10), fact(0, 1, SEALED, 15, is_drained=False)], None),
        ([fact(0, 0, DIGESTED, 10), fact(0, 1, SEALED, 15)], 1),
        ([fact(0, 0, DIGESTED, 10), fact(0, 1, WRITING, 15)], None),
        ([fact(0, 0, DIGESTED, 10), fact(0, 1, None)], None),
        ([fact(0, 0, DIGESTED, 10, run=1), fact(0, 1, DIGESTED, 5)], 0),
    ],
)
def test_which_slot_may_be_overwritten(facts: list[SlotFact], index: int | None) -> None:
    assert chosen(*facts) == index


def test_ranks_that_lag_behind_keep_the_older_step() -> None:
    mine = [fact(0, 0, DIGESTED, 5, world_size=2), fact(0, 1, DIGESTED, 10, world_size=2)]
    theirs = [fact(1, 0, DIGESTED, 5, world_size=2), fact(1, 1, WRITING, 10, world_size=2)]
    assert chosen(*mine, *theirs) == 1
    theirs[1] = fact(1, 1, DIGESTED, 10, world_size=2)
    assert chosen(*mine, *theirs) == 0


def test_the_reason_names_what_is_in_the_way() -> None:
    facts = [fact(0, 0, DIGESTED, 10), fact(0, 1, SEALED, 15, is_drained=False)]
    reason = choose_slot(facts, rank=0, num_slots=2, run=7)[1]
    assert reason == "step 10 in slot 0 is the newest complete one; step 15 in slot 1 is not stored yet"
