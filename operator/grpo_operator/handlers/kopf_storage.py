"""kopf storages that store nothing.

The operator handles raw watch events only, so kopf never reads what it stored. kopf's default storages copy
each object several times per event, which is most of the cost of the events of thousands of pods.
"""

from typing import Any

import kopf


class NullDiffBase(kopf.DiffBaseStorage):
    """Storage of the last handled state of objects."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Do nothing."""


class NoProgress(kopf.ProgressStorage):
    """Storage of the progress of handlers."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Do nothing."""

    def purge(self, **_: Any) -> None:
        """Do nothing."""

    def touch(self, **_: Any) -> None:
        """Do nothing."""

    def clear(self, *, essence: Any) -> Any:
        return essence
