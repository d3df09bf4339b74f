"""Small files that are there whole or not at all."""

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write ``path`` by way of a file beside it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)
