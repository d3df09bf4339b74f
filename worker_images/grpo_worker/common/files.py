"""Atomic writes of small files."""

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write ``path`` atomically, by renaming a temporary file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)
