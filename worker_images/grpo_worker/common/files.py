"""Atomic writes of small files."""

import json
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write ``path`` atomically, by renaming a temporary file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def truncate_lines(path: Path, step: int) -> None:
    """Keep only the JSON lines of ``path`` whose "step" is at most ``step``; atomic."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line truncated by a crash belongs to a lost step
        if record["step"] <= step:
            kept.append(line)
    write_text(path, "".join(line + "\n" for line in kept))
