"""Errors of the files of a model."""

import os
from pathlib import Path


def unreadable(name: str) -> str:
    """Return the problem of a file that this process's user may not read, with the remedy."""
    return (
        f"{name} cannot be read by uid {os.getuid()}: let others read the files (chmod -R o+rX), or set "
        "spec.scheduling.securityContext.runAsUser to their owner"
    )


class ModelFilesError(ValueError):
    """The files are not those of a model that a job can train; a retry does not help."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"spec.model.path={folder}: {problem}")
