"""Storages of kopf that keep nothing: only watches are handled, so nothing is ever read from them.

kopf's own copy each object several times for each of its events, which is most of what the events of
thousands of pods cost.
"""

from typing import Any

import kopf


class NullDiffBase(kopf.DiffBaseStorage):
    """No object's last handled state."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""


class NoProgress(kopf.ProgressStorage):
    """No handler's progress."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""

    def purge(self, **_: Any) -> None:
        """Nothing is kept."""

    def touch(self, **_: Any) -> None:
        """Nothing is kept."""

    def clear(self, *, essence: Any) -> Any:
        return essence
