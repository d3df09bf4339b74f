"""Profiles of an engine, which its server writes to a folder that it shares with the agent."""

import re
import shutil
from pathlib import Path

from grpo_worker.weightsync.agent.engine_client import Engine

FOLDER = "profile"  # beside the config.json of the engine's model
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class ProfileError(ValueError):
    """A profile that does not exist, or that an engine cannot record."""


class EngineProfiles:
    """The last profile of one engine; the next one replaces its files.

    Of an engine of several hosts, its ranks on the first host are recorded into the agent's pod.
    """

    def __init__(self, engine: Engine, ranks: int, folder: Path) -> None:
        """``ranks``: of the engine on this host. ``folder``: shared with the server."""
        self._engine = engine
        self._ranks = ranks
        self._folder = folder

    def start(self, identity: str, steps: int) -> None:
        """Let the engine trace its next ``steps`` forward passes. Raises EngineError."""
        folder = self._of(identity)
        shutil.rmtree(self._folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._engine.start_profile(folder, identity, steps)

    def files(self, identity: str) -> list[str]:
        """Return the names of the files once they are complete, else an empty list. Raises ProfileError."""
        folder = self._of(identity)
        if not folder.is_dir():
            raise ProfileError(f"profile {identity}: the engine's pod has no such profile")
        names = sorted(path.name for path in folder.glob("*.trace.json.gz"))
        if len(names) < self._ranks:
            return []
        # The scheduler writes the files between two passes, and answers nothing meanwhile.
        self._engine.await_scheduler()
        return names

    def path(self, identity: str, name: str) -> Path:
        """Return the path of a file. Raises ProfileError."""
        path = self._of(identity) / _plain(name)
        if not path.is_file():
            raise ProfileError(f"profile {identity}: no file {name}")
        return path

    def _of(self, identity: str) -> Path:
        return self._folder / _plain(identity)


def _plain(name: str) -> str:
    if not _NAME.match(name):
        raise ProfileError(f"{name!r} is no name of a profile or of a file of it")
    return name
