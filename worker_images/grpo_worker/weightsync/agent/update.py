"""One update of one engine as a state machine (pure).

PLAN -> PREPARE -> TRANSFER -> COMMIT -> COMMITTED, or ABORTED from any of them. Nothing else is
possible: no commit with a bucket missing, no bucket twice or out of turn, no way back.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    """Where an update is. PLAN: slices are fetched and checked; PREPARE: the group is joined and the engine
    stands still; TRANSFER: buckets go; COMMIT: the engine's own word is awaited."""

    PLAN = "plan"
    PREPARE = "prepare"
    TRANSFER = "transfer"
    COMMIT = "commit"
    COMMITTED = "committed"
    ABORTED = "aborted"


_NEXT = {
    Phase.PLAN: Phase.PREPARE,
    Phase.PREPARE: Phase.TRANSFER,
    Phase.TRANSFER: Phase.COMMIT,
    Phase.COMMIT: Phase.COMMITTED,
}


class TransactionError(RuntimeError):
    """A step that an update does not have where it is."""


@dataclass(frozen=True, slots=True)
class Update:
    """``sent`` of ``buckets`` buckets have left; ``reason`` is set when it was aborted."""

    version: int
    phase: Phase = Phase.PLAN
    plan_id: str = ""
    buckets: int = 0
    sent: int = 0
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.COMMITTED, Phase.ABORTED)

    def prepare(self, plan_id: str, buckets: int) -> "Update":
        """The plan is whole; ``buckets`` of it must go."""
        if not plan_id or buckets < 1:
            raise TransactionError(
                f"{self.place}: a plan needs an id and a bucket, got {plan_id!r}, {buckets}"
            )
        return replace(self._to(Phase.PREPARE), plan_id=plan_id, buckets=buckets)

    def transfer(self, plan_id: str) -> "Update":
        """The engine stands still for the plan ``plan_id``."""
        if plan_id != self.plan_id:
            raise TransactionError(f"{self.place}: prepared for plan {self.plan_id}, not for {plan_id}")
        return self._to(Phase.TRANSFER)

    def bucket(self, index: int) -> "Update":
        """Bucket ``index`` has left."""
        if self.phase != Phase.TRANSFER or index != self.sent or index >= self.buckets:
            raise TransactionError(f"{self.place}: bucket {index} is not the next")
        return replace(self, sent=self.sent + 1)

    def commit(self) -> "Update":
        """All buckets have left; the engine says whether it holds them."""
        if self.phase == Phase.TRANSFER and self.sent != self.buckets:
            raise TransactionError(f"{self.place}: {self.buckets - self.sent} buckets are missing")
        return self._to(Phase.COMMIT)

    def committed(self, version: str) -> "Update":
        """The engine reports ``version``."""
        if version != str(self.version):
            raise TransactionError(f"{self.place}: the engine reports version {version}")
        return self._to(Phase.COMMITTED)

    def aborted(self, reason: str) -> "Update":
        """Something failed; the place of the failure stays readable in ``reason``."""
        if self.ended:
            raise TransactionError(f"{self.place}: it has ended")
        return replace(self, phase=Phase.ABORTED, reason=f"{self.place}: {reason}")

    @property
    def place(self) -> str:
        """For messages: version, phase and bucket."""
        where = f", bucket {self.sent} of {self.buckets}" if self.phase == Phase.TRANSFER else ""
        return f"version {self.version}, {self.phase}{where}"

    def _to(self, phase: Phase) -> "Update":
        if _NEXT.get(self.phase) != phase:
            raise TransactionError(f"{self.place}: no way to {phase}")
        return replace(self, phase=phase)
