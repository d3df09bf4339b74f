"""Room in the store for the next checkpoint, which a thread measures beside the steps."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from grpo_worker.checkpointing.space import checkpoint_bytes, make_room, space_of
from grpo_worker.checkpointing.store import complete
from grpo_worker.common.store_path import StorePath

log = logging.getLogger(__name__)
_GIB = 2**30


class StoreRoom:
    """What a thread has found about the room for the next checkpoint.

    The next one takes as much as the newest complete one, or, for the first, as much as the ranks estimate.
    A store that does not answer, or does not know its size, is not known to be full.
    """

    def __init__(
        self, root: StorePath, keep: int, store: str, submit: "Callable[[Callable[[], str]], Future[str]]"
    ) -> None:
        """``store``: its name in messages. ``submit``: runs work in the thread."""
        self._root, self._keep, self._store = root, keep, store
        self._submit = submit
        self._look: Future[str] | None = None
        self._found = ""
        self._looks = 0  # that count
        self.attempt = 0  # that owns the store
        self.estimate = 0  # bytes of the first checkpoint; 0: unknown

    def look(self) -> None:
        """Start to measure, unless that is being done."""
        self._note()
        if self._look is None:
            self._looks += 1
            self._look = self._submit(partial(self._measure, self._looks))

    def shortage(self) -> str:
        """Return what is missing according to the newest measurement, or ""; no call on the store."""
        self._note()
        return self._found

    def measured(self) -> str:
        """Measure and return what is missing, or "". Waits for the store."""
        self.look()
        assert self._look is not None
        self._found, self._look = self._look.result(), None
        return self._found

    def forget(self) -> None:
        """Forget the measurements, also the one that is being made: a checkpoint begins."""
        self._look, self._found = None, ""
        self._looks += 1

    def _note(self) -> None:
        if self._look is not None and self._look.done():
            self._found, self._look = self._look.result(), None

    def _measure(self, look: int) -> str:
        try:
            needed = self._needed()
            space = space_of(self._root)
            missing = space.missing(needed)
            if missing and look == self._looks and make_room(self._root, self._keep, self.attempt, missing):
                log.warning("the oldest checkpoints were removed: %s has too little room", self._store)
                space = space_of(self._root)
                missing = space.missing(needed)
        except (OSError, ValueError, KeyError) as error:
            log.warning("the room in %s is not known: %r", self._store, error)
            return ""
        if not missing:
            return ""
        return (
            f"{self._store} has {_gib(space.free)} free of the {_gib(needed)} that a checkpoint takes: free "
            f"{_gib(missing)} in {self._root} or enlarge it"
        )

    def _needed(self) -> int:
        newest = next(reversed(complete(self._root).values()), None)
        return checkpoint_bytes(newest) if newest else self.estimate


def _gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"
