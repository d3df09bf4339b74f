"""Trials of prompts that are suspected to make engines fail (pure)."""

from collections.abc import Collection


class Trials:
    """Engines that try a suspected prompt: one prompt at a time on each, and each prompt on one engine.

    A failure then has one suspect, and a prompt that ends engines ends one at a time.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, int]] = {}  # engine -> prompt and number of its requests

    def allowed(self, prompt: int, engines: Collection[str]) -> list[str]:
        """Return those of ``engines`` that may try a prompt now."""
        mine = [engine for engine, (tried, _) in self._running.items() if tried == prompt]
        return [engine for engine in engines if (engine in mine if mine else engine not in self._running)]

    def begin(self, engine: str, prompt: int) -> None:
        """Note a request that tries ``prompt``."""
        _, requests = self._running.get(engine, (prompt, 0))
        self._running[engine] = prompt, requests + 1

    def end(self, engine: str) -> None:
        """Note the end of a request's trial."""
        prompt, requests = self._running.pop(engine)
        if requests > 1:
            self._running[engine] = prompt, requests - 1
