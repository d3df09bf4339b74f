"""GPU lease: the parts of its GPUs' memory that an engine may hold in mode colocated.

Trainers and engines use the same GPUs in turn. The controller grants an engine its weights and KV cache while
it generates, and revokes them while the trainers work.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_worker.weightsync.agent.engine_client import Engine

log = logging.getLogger(__name__)
WEIGHTS, KV_CACHE = "weights", "kv_cache"  # SGLang's tags
EVERYTHING = (KV_CACHE, WEIGHTS)


@dataclass(slots=True)
class _State:
    """Parts that the engine may hold (``granted``) and holds (``held``), in alphabetical order.

    ``starting``: a server may be starting; it allocates all parts.
    """

    granted: tuple[str, ...]
    held: tuple[str, ...]
    starting: bool = False


class GpuLease:
    """Lease of one engine.

    ``state_file``: keeps the lease across restarts of this process, because SGLang has no API that returns
    which parts it holds. None: the engine has its GPUs for itself. With a file, nothing is granted until the
    controller grants it.
    """

    def __init__(self, engine: Engine, state_file: Path | None = None) -> None:
        self._engine = engine
        self._file = state_file
        initial = () if state_file is not None else EVERYTHING
        self._state = _State(initial, initial)
        if state_file is not None and state_file.is_file():
            saved = json.loads(state_file.read_text())
            self._state = _State(tuple(saved["granted"]), tuple(saved["held"]), saved["starting"])

    @property
    def has_weights(self) -> bool:
        """True if the engine holds memory for weights; only then can they be written."""
        return WEIGHTS in self._state.held

    @property
    def settled(self) -> bool:
        """True if the engine holds exactly what it was granted, and none is starting."""
        return self._state.held == self._state.granted and not self._state.starting

    @property
    def waits(self) -> bool:
        """True if the trainers have the GPUs and the engine has released its memory."""
        return not self._state.granted and self.settled

    def may_start(self) -> bool:
        """Return whether a server may start now. The caller starts one then; the old one is gone."""
        allowed = self._state.granted == EVERYTHING
        if self._file is not None:
            self._update(starting=allowed, held=())
        return allowed

    def on_engine_up(self) -> None:
        """Note that a server answers. If it is a new one, it has allocated all parts."""
        if self._state.starting:
            self._update(starting=False, held=EVERYTHING)

    def grant(self, parts: Iterable[str]) -> None:
        """Set the parts that the engine may hold. Raises ValueError for an unknown part."""
        granted = tuple(sorted(set(parts)))
        if not set(granted) <= set(EVERYTHING):
            raise ValueError(f"parts of an engine's memory are {', '.join(EVERYTHING)}, not {granted}")
        self._update(granted=granted)

    def apply(self) -> None:
        """Make the engine release parts that are not granted and allocate granted ones. Raises EngineError.

        The content of newly allocated parts is undefined.
        """
        granted, held = self._state.granted, self._state.held
        surplus = [part for part in held if part not in granted]
        missing = [part for part in granted if part not in held]
        if surplus:
            self._engine.release_memory(surplus)
        if missing:
            self._engine.resume_memory(missing)
        if surplus or missing:
            log.info("GPU memory held by the engine: %s", ", ".join(granted) or "none")
            self._update(held=granted)

    def _update(self, **changes: Any) -> None:
        """Change the state and save it."""
        before = asdict(self._state)
        self._state = _State(**(before | changes))
        if self._file is not None and asdict(self._state) != before:
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(self._state)))
            partial.rename(self._file)
