"""Owners of exports: the ranks of an attempt, or a program that exports a checkpoint."""

import re
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.exports import CONFIG
from grpo_worker.common.store_path import StorePath, has_file


class ExportOwner(ABC):
    """Writer of an export.

    ``replaces``: its export takes the place of a complete one of the same name. ``key``: no other owner has
    it. ``name``: part of the name of a directory that is not complete.
    """

    replaces: ClassVar[bool]

    @property
    @abstractmethod
    def key(self) -> str: ...

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def outlives(self, building: str) -> bool:
        """Return whether an incomplete directory of the same export may be removed, by its name."""

    @abstractmethod
    def check_begin(self, target: StorePath) -> None:
        """Raise FileExistsError if the owner may not write the export ``target``."""

    @abstractmethod
    def check_complete(self, target: StorePath) -> None:
        """Raise SupersededError or FileExistsError if the owner may not complete ``target``."""


@dataclass(frozen=True, slots=True)
class AttemptOwner(ExportOwner):
    """The ranks of an attempt of the job in whose folder the export is."""

    replaces: ClassVar[bool] = True
    attempt: int

    @property
    def key(self) -> str:
        return str(self.attempt)

    @property
    def name(self) -> str:
        return f"attempt-{self.attempt}"

    def outlives(self, building: str) -> bool:
        """Return whether no newer attempt writes it; names of earlier versions have no attempt."""
        found = re.search(r"\.attempt-(\d+)\.incomplete$", building)
        return not found or int(found[1]) <= self.attempt

    def check_begin(self, target: StorePath) -> None: ...

    def check_complete(self, target: StorePath) -> None:
        attempts.check(target.parent.parent, self.attempt)


@dataclass(frozen=True, slots=True)
class ProgramOwner(ExportOwner):
    """A program, which may be killed and run again. Its exports have other names than those of jobs."""

    replaces: ClassVar[bool] = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def name(self) -> str:
        return f"program-{self.key}"

    def outlives(self, building: str) -> bool:
        return True

    def check_begin(self, target: StorePath) -> None:
        if target.is_dir() if isinstance(target, Path) else has_file(target / CONFIG):
            raise FileExistsError(f"{target} is a complete export: choose another name, or remove it")

    def check_complete(self, target: StorePath) -> None:
        self.check_begin(target)
