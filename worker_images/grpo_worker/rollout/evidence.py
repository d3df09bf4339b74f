"""Evidence that a prompt, and not an engine, makes requests fail (pure)."""

from collections.abc import Collection

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.routing import EngineEntry, Life
from grpo_worker.rollout.unfinished import STREAM_INTERVAL

FAILURES = 3  # on different engine lives, or on all engines that serve: the prompt is at fault
ADVANCE = STREAM_INTERVAL  # tokens after which a sample has got past the place where it failed


class Served:
    """Prompts that each engine life has served; two of them say whether it serves others than a given one."""

    def __init__(self) -> None:
        self._by_engine: dict[str, tuple[Life, list[int]]] = {}
        self._recent: list[Prompt] = []

    def note(self, entry: EngineEntry, prompt: Prompt) -> None:
        """Note that an engine has completed an answer to ``prompt``, or added ADVANCE tokens to one."""
        life, served = self._by_engine.get(entry.name, (entry.life, []))
        if life != entry.life:
            served = []
        if prompt.index not in served:
            self._by_engine[entry.name] = entry.life, [prompt.index, *served[:1]]
        if all(prompt.index != known.index for known in self._recent):
            self._recent = [prompt, *self._recent[:1]]

    def others(self, entry: EngineEntry, prompt: Prompt) -> bool:
        """Return whether this life of an engine has served a prompt other than ``prompt``."""
        life, served = self._by_engine.get(entry.name, (entry.life, []))
        return life == entry.life and any(index != prompt.index for index in served)

    def control(self, prompt: Prompt) -> Prompt | None:
        """Return a prompt other than ``prompt`` that some engine has served; None: there is none yet."""
        return next((known for known in self._recent if known.index != prompt.index), None)


class Evidence:
    """Failures of one sample at one place of its answer.

    ``suspect``: an attempt has failed at this place without another explanation.
    """

    def __init__(self) -> None:
        self.suspect = False
        self._place = 0  # tokens of the answer when the last attempt ended
        self._lives: list[Life] = []

    @property
    def count(self) -> int:
        """Number of failures that count against the prompt."""
        return len(self._lives)

    @property
    def engines(self) -> set[str]:
        """Names of the engines of these failures."""
        return {life.name for life in self._lives}

    def ended(self, tokens: int) -> bool:
        """Note the ``tokens`` of the answer when an attempt ended early; return whether it made no progress.

        An attempt makes progress when it ends at another place than the one before.
        """
        fruitless = abs(tokens - self._place) < ADVANCE
        self._place = tokens
        if not fruitless:
            self.acquit()
        return fruitless

    def reached(self, tokens: int) -> bool:
        """Acquit the prompt if its answer has got past the place of the failures; return whether it has."""
        if tokens < self._place + ADVANCE:
            return False
        self.acquit()
        return True

    def charge(self, entry: EngineEntry) -> None:
        """Count a failure on an engine that serves others."""
        self._lives.append(entry.life)

    def convicts(self, serving: Collection[str]) -> bool:
        """Return whether the prompt is at fault. ``serving``: engines that could try it now."""
        everyone = bool(serving) and set(serving) <= self.engines
        return len(set(self._lives)) >= FAILURES or (everyone and self.count >= FAILURES)

    def acquit(self) -> None:
        """Forget all failures."""
        self.suspect = False
        self._lives.clear()
