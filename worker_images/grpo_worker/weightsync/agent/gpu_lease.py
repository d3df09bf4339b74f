"""What of its GPUs' memory an engine holds, where trainers and engines take turns on the same GPUs."""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_worker.weightsync.agent.engine_client import Engine

log = logging.getLogger(__name__)
WEIGHTS, KV_CACHE = "weights", "kv_cache"  # SGLang's names
EVERYTHING = (KV_CACHE, WEIGHTS)


@dataclass(slots=True)
class _State:
    """Parts, in alphabetical order. ``granted``: what the engine may hold, ``held``: what it holds;
    ``starting``: may a server be on its way up, which takes everything?"""

    granted: tuple[str, ...]
    held: tuple[str, ...]
    starting: bool = False


class GpuLease:
    """One engine's. ``shared``: a file beside the engine; the controller says whose turn it is, and until
    then it is the trainers'. Without it the engine has its GPUs for itself.

    The file outlives this process: what an engine holds cannot be asked.
    """

    def __init__(self, engine: Engine, shared: Path | None = None) -> None:
        self._engine = engine
        self._file = shared
        own = () if shared is not None else EVERYTHING
        self._state = _State(own, own)
        if shared is not None and shared.is_file():
            told = json.loads(shared.read_text())
            self._state = _State(tuple(told["granted"]), tuple(told["held"]), told["starting"])

    @property
    def has_weights(self) -> bool:
        """Only then can they be written."""
        return WEIGHTS in self._state.held

    @property
    def settled(self) -> bool:
        """Is it as the controller has said? An engine that is just starting will hold what it may not."""
        return self._state.held == self._state.granted and not self._state.starting

    @property
    def waits(self) -> bool:
        """Is it the trainers' turn, and has the engine made room?"""
        return not self._state.granted and self.settled

    def may_start(self) -> bool:
        """Asked before a server is started; the one before is gone."""
        allowed = self._state.granted == EVERYTHING
        if self._file is not None:
            self._note(starting=allowed, held=())
        return allowed

    def came_up(self) -> None:
        """A server answers; a new one has taken everything."""
        if self._state.starting:
            self._note(starting=False, held=EVERYTHING)

    def grant(self, parts: Iterable[str]) -> None:
        """From now on the engine may hold these parts. Raises ValueError for others than there are."""
        granted = tuple(sorted(set(parts)))
        if not set(granted) <= set(EVERYTHING):
            raise ValueError(f"parts of an engine's memory are {', '.join(EVERYTHING)}, not {granted}")
        self._note(granted=granted)

    def settle(self) -> None:
        """Release what is held beyond what is granted, and take the rest, undefined. Raises EngineError."""
        granted, held = self._state.granted, self._state.held
        surplus = [part for part in held if part not in granted]
        missing = [part for part in granted if part not in held]
        if surplus:
            self._engine.release_memory(surplus)
        if missing:
            self._engine.take_memory(missing)
        if surplus or missing:
            log.info("of the GPUs' memory the engine holds %s", ", ".join(granted) or "nothing")
            self._note(held=granted)

    def _note(self, **changes: Any) -> None:
        before = asdict(self._state)
        self._state = _State(**(before | changes))
        if self._file is not None and asdict(self._state) != before:
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(self._state)))
            partial.rename(self._file)
