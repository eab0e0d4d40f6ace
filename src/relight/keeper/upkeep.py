"""Bringing the slots in order: what is sealed is drained, what dead owners left is freed, what nobody needs goes."""

from __future__ import annotations

import logging
from contextlib import suppress

from relight.errors import CopyError
from relight.keeper.arena import SlotControl, SlotState
from relight.keeper.drain import Drainer
from relight.keeper.journal import Journal
from relight.keeper.ledger import Ledger
from relight.keeper.roster import Roster
from relight.keeper.slots import SlotFact, SlotId, SlotTable, StepKey, newest_complete

__all__ = ["Upkeep"]

_log = logging.getLogger("relight.keeper")


class Upkeep:
    """Looks at all slots and acts on what it sees; called from one thread."""

    def __init__(
        self, *, journal: Journal, roster: Roster, ledger: Ledger, slots: SlotTable, drainer: Drainer
    ) -> None:
        self._journal = journal
        self._roster = roster
        self._ledger = ledger
        self._slots = slots
        self._drainer = drainer

    def facts(self) -> list[SlotFact]:
        """Return what is known of every slot now."""
        return self._slots.facts(leased=self._roster.leased(), is_drained=self._ledger.is_drained)

    def rescan(self) -> None:
        """Look at every slot; cheap enough for each second and each attach."""
        newest = newest_complete(self.facts(), self._journal.record.run)
        for slot in self._slots.ids():
            control = self._slots.control(slot)
            if control is None:
                self._remove_broken(slot)
            elif control.state is SlotState.WRITING:
                # One that is lent may be sealed between our look and the word FREE.
                if not (self._roster.is_leased(slot) or self._roster.is_owned(slot, control.owner_pid)):
                    self._slots.free(slot)
            elif control.state is not SlotState.FREE:
                with suppress(CopyError):
                    self.take_in(slot)
                self._drop_other_run(slot, control)
            if control is not None:
                self._drop_unused(slot, control, newest)
        self._slots.drop_stale()

    def take_in(self, slot: SlotId) -> StepKey:
        """Digest and drain a sealed slot, which is lent to nobody any more; raises as `Drainer.submit`."""
        key = self._drainer.submit(slot)
        self._roster.take_back(slot)
        return key

    def submit_again(self, slots: list[SlotId]) -> None:
        """Drain slots once more that still hold a snapshot."""
        for slot in slots:
            with suppress(CopyError):
                self._drainer.submit(slot)

    def _remove_broken(self, slot: SlotId) -> None:
        if not self._roster.is_owned(slot):
            _log.info("%s is half made or broken, and its owner is gone; removed", self._slots.path(slot))
            self._slots.remove(slot)

    def _drop_other_run(self, slot: SlotId, control: SlotControl) -> None:
        """Free a snapshot of a run that used this root before, once nothing works on it: it is never restored."""
        run = self._journal.record.run
        if run in (None, control.run_digest) or not self._ledger.is_drained(slot, StepKey.of(control)):
            return
        _log.info("%s holds step %d of another run; freed", self._slots.path(slot), control.step)
        self._ledger.forget(slot)
        self._slots.free(slot)

    def _drop_unused(self, slot: SlotId, control: SlotControl, newest: StepKey | None) -> None:
        """Remove a drained slot of a rank that this generation does not have, once it has a complete step."""
        owners = self._roster.owners()
        if not owners or newest is None or newest.generation < max(one.generation for one in owners):
            return
        if slot.rank < max(one.world_size for one in owners) or self._roster.is_leased(slot):
            return
        key = StepKey.of(control)
        if key != newest and (control.state is SlotState.FREE or self._ledger.is_drained(slot, key)):
            self._ledger.forget(slot)
            self._slots.remove(slot)
