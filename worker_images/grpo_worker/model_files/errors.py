"""Errors of the files of a model."""

from pathlib import Path


class ModelFilesError(ValueError):
    """The files are not those of a model that a job can train; a retry does not help."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"spec.model.path={folder}: {problem}")
