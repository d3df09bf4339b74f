"""Retries of engines whose direct transfer failed: the same engine is tried ever more rarely. Pure."""

from dataclasses import dataclass
from typing import Generic, TypeVar

I = TypeVar("I")  # noqa: E741 - identity of an engine
_MOST = 63  # versions between two tries


@dataclass(slots=True)
class _Failed(Generic[I]):
    identity: I
    pause: int  # versions to skip after this failure
    skipped: int = 0


class Retries(Generic[I]):
    """Failures by engine. A link that does not form takes long to fail, so the pause doubles."""

    def __init__(self) -> None:
        self._failed: dict[str, _Failed[I]] = {}

    def rest(self, engine: str, identity: I) -> int:
        """Return for how many versions the engine is left out, counting this one; 0: try it now.

        An engine of another identity is tried at once.
        """
        failed = self._failed.get(engine)
        if failed is None or failed.identity != identity or failed.skipped >= failed.pause:
            return 0
        failed.skipped += 1
        return failed.pause - failed.skipped + 1

    def failed(self, engine: str, identity: I) -> None:
        """Note a failure."""
        before = self._failed.get(engine)
        again = before is not None and before.identity == identity
        pause = min(2 * before.pause + 1, _MOST) if before is not None and again else 1
        self._failed[engine] = _Failed(identity, pause)

    def succeeded(self, engine: str) -> None:
        """Forget the failures of an engine."""
        self._failed.pop(engine, None)
