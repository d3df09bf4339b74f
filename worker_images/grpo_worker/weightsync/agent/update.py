"""State machine of one update of one engine. Pure.

PLAN -> PREPARE -> TRANSFER -> COMMIT -> COMMITTED, or ABORTED from any of the first four. It refuses a commit
with missing buckets, a bucket twice or out of order, and a step back.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    """Phase of an update.

    PLAN: the plan is made, and the first chunk of a staged version is fetched; a double buffer is filled.
    PREPARE: the engine's ranks are connected and the engine is paused.
    TRANSFER: buckets are sent, or the double buffer is installed. COMMIT: the engine confirms the version.
    """

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
    """The update is in a phase that does not allow this step."""


@dataclass(frozen=True, slots=True)
class Update:
    """Progress of an update: ``sent`` of ``buckets`` buckets. ``reason``: set if it was aborted."""

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
        """Enter PREPARE: the plan is complete and has ``buckets`` buckets."""
        if not plan_id or buckets < 1:
            raise TransactionError(
                f"{self.place}: a plan needs an id and a bucket, got {plan_id!r}, {buckets}"
            )
        return replace(self._to(Phase.PREPARE), plan_id=plan_id, buckets=buckets)

    def transfer(self, plan_id: str) -> "Update":
        """Enter TRANSFER: the engine is paused for the plan ``plan_id``."""
        if plan_id != self.plan_id:
            raise TransactionError(f"{self.place}: prepared for plan {self.plan_id}, not for {plan_id}")
        return self._to(Phase.TRANSFER)

    def bucket(self, index: int) -> "Update":
        """Count bucket ``index`` as sent."""
        if self.phase != Phase.TRANSFER or index != self.sent or index >= self.buckets:
            raise TransactionError(f"{self.place}: bucket {index} is not the next")
        return replace(self, sent=self.sent + 1)

    def commit(self) -> "Update":
        """Enter COMMIT: all buckets were sent."""
        if self.phase == Phase.TRANSFER and self.sent != self.buckets:
            raise TransactionError(f"{self.place}: {self.buckets - self.sent} buckets are missing")
        return self._to(Phase.COMMIT)

    def committed(self, version: str) -> "Update":
        """Enter COMMITTED: the engine reports ``version``."""
        if version != str(self.version):
            raise TransactionError(f"{self.place}: the engine reports version {version}")
        return self._to(Phase.COMMITTED)

    def aborted(self, reason: str) -> "Update":
        """Enter ABORTED. The stored reason names the phase and bucket of the failure."""
        if self.ended:
            raise TransactionError(f"{self.place}: it has ended")
        return replace(self, phase=Phase.ABORTED, reason=f"{self.place}: {reason}")

    @property
    def place(self) -> str:
        """Version, phase and bucket, for messages."""
        where = f", bucket {self.sent} of {self.buckets}" if self.phase == Phase.TRANSFER else ""
        return f"version {self.version}, {self.phase}{where}"

    def _to(self, phase: Phase) -> "Update":
        if _NEXT.get(self.phase) != phase:
            raise TransactionError(f"{self.place}: no way to {phase}")
        return replace(self, phase=phase)
