"""What of its GPUs' memory an engine holds, where trainers and engines take turns on the same GPUs."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_worker.weightsync.engine import Engine

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _State:
    """``granted``: is it the engine's turn? ``starting``: may a server be on its way up, which takes
    everything? ``held``: is the memory the engine's?"""

    granted: bool
    starting: bool
    held: bool


class GpuMemory:
    """One engine's. ``shared``: a file beside the engine; the controller says whose turn it is, and until
    then it is the trainers'. Without it the engine has its GPUs for itself.

    The file outlives this process: what an engine holds cannot be asked.
    """

    def __init__(self, engine: Engine, shared: Path | None = None) -> None:
        self._engine = engine
        self._file = shared
        if shared is not None and shared.is_file():
            self._state = _State(**json.loads(shared.read_text()))
        else:
            self._state = _State(granted=shared is None, starting=False, held=shared is None)

    @property
    def held(self) -> bool:
        """Only then can weights be written."""
        return self._state.held

    @property
    def settled(self) -> bool:
        """Is it as the controller has said? An engine that is just starting will hold what it may not."""
        return self._state.held == self._state.granted and not self._state.starting

    def may_start(self) -> bool:
        """Asked before a server is started; the one before is gone."""
        if self._file is not None:
            self._note(starting=self._state.granted, held=False)
        return self._state.granted

    def came_up(self) -> None:
        """A server answers; a new one has taken everything."""
        if self._state.starting:
            self._note(starting=False, held=True)

    def grant(self, granted: bool) -> None:
        """From now on it is the engine's turn, or that of the trainers."""
        self._note(granted=granted)

    def settle(self) -> None:
        """Release what is held beyond one's turn, or take it back, undefined. Raises EngineError."""
        granted = self._state.granted
        if self._state.held == granted:
            return
        if granted:
            self._engine.take_memory_back()
        else:
            self._engine.release_memory()
        self._note(held=granted)
        log.info("the GPUs' memory is %s", "the engine's" if granted else "released")

    def _note(self, **changes: bool) -> None:
        before = asdict(self._state)
        self._state = _State(**(before | changes))
        if self._file is not None and asdict(self._state) != before:
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(self._state)))
            partial.rename(self._file)
