"""Small files that are there whole or not at all."""

import json
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write ``path`` by way of a file beside it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def truncate_lines(path: Path, step: int) -> None:
    """Keep the JSON lines of ``path`` whose "step" is at most ``step``; atomic."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line cut off by a crash belongs to a lost step
        if record["step"] <= step:
            kept.append(line)
    write_text(path, "".join(line + "\n" for line in kept))
