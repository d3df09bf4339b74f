"""Atomic writes of small files."""

from pathlib import Path


def write_text(path: Path, text: str, suffix: str = ".tmp") -> None:
    """Write ``path`` atomically, by renaming a temporary file with ``suffix``, its own for each writer."""
    temporary = path.with_suffix(suffix)
    temporary.write_text(text)
    temporary.rename(path)
