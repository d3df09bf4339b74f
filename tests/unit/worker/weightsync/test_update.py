"""An update's state machine: every bucket once and in order, or an abort that names its place."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grpo_worker.weightsync.agent.update import Phase, TransactionError, Update

ORDER = [Phase.PLAN, Phase.PREPARE, Phase.TRANSFER, Phase.COMMIT, Phase.COMMITTED]


def test_a_complete_update_passes_every_phase() -> None:
    update = Update(4).prepare("p", 2).transfer("p").bucket(0).bucket(1).commit().committed("4")
    assert update.phase == Phase.COMMITTED and update.ended


@pytest.mark.parametrize(
    ("update", "step", "message"),
    [
        (Update(4), lambda u: u.prepare("", 1), "needs an id"),
        (Update(4).prepare("p", 2), lambda u: u.transfer("q"), "prepared for plan p, not for q"),
        (
            Update(4).prepare("p", 2).transfer("p"),
            lambda u: u.bucket(1),
            "bucket 0 of 2: bucket 1 is not the",
        ),
        (Update(4).prepare("p", 2).transfer("p").bucket(0), lambda u: u.commit(), "1 buckets are missing"),
        (
            Update(4).prepare("p", 1).transfer("p").bucket(0).commit(),
            lambda u: u.committed("3"),
            "version 4, commit: the engine reports version 3",
        ),
        (Update(4), lambda u: u.committed("4"), "version 4, plan: no way to committed"),
    ],
)
def test_transitions_out_of_order_are_refused(update: Update, step: object, message: str) -> None:
    with pytest.raises(TransactionError, match=message):
        step(update)  # type: ignore[operator]


class Updates(RuleBasedStateMachine):
    """Steps in any order: a step out of order is refused and changes nothing."""

    @initialize(buckets=st.integers(1, 3))
    def begin(self, buckets: int) -> None:
        self.buckets, self.update, self.sent = buckets, Update(7), 0
        self.past: list[Phase] = [Phase.PLAN]

    def _try(self, step: object, allowed: bool) -> None:
        before = self.update
        try:
            self.update = step(before)  # type: ignore[operator]
        except TransactionError:
            assert not allowed and self.update is before
            return
        assert allowed
        if self.update.phase != before.phase:
            self.past.append(self.update.phase)

    @rule()
    def prepare(self) -> None:
        self._try(lambda u: u.prepare("p", self.buckets), self.update.phase == Phase.PLAN)

    @rule(plan=st.sampled_from(["p", "q"]))
    def transfer(self, plan: str) -> None:
        self._try(lambda u: u.transfer(plan), self.update.phase == Phase.PREPARE and plan == "p")

    @rule(index=st.integers(0, 3))
    def bucket(self, index: int) -> None:
        allowed = self.update.phase == Phase.TRANSFER and index == self.sent < self.buckets
        self._try(lambda u: u.bucket(index), allowed)
        self.sent += allowed

    @rule()
    def commit(self) -> None:
        whole = self.sent == self.buckets
        self._try(lambda u: u.commit(), self.update.phase == Phase.TRANSFER and whole)

    @rule(version=st.sampled_from(["7", "6", "default"]))
    def committed(self, version: str) -> None:
        self._try(lambda u: u.committed(version), self.update.phase == Phase.COMMIT and version == "7")

    @rule()
    def aborts(self) -> None:
        if not self.update.ended:
            place = self.update.place
            self._try(lambda u: u.aborted("lost"), True)
            assert self.update.reason == f"{place}: lost"
        else:
            self._try(lambda u: u.aborted("lost"), False)

    @invariant()
    def in_order(self) -> None:
        path = [phase for phase in self.past if phase != Phase.ABORTED]
        assert path == ORDER[: len(path)] and Phase.ABORTED not in self.past[:-1]
        assert self.update.phase != Phase.COMMITTED or self.update.sent == self.buckets


TestUpdates = Updates.TestCase
TestUpdates.settings = settings(max_examples=80, stateful_step_count=30)
