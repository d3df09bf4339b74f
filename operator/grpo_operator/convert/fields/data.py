"""Data files of a configuration, and the volume that holds them."""

import re
from collections.abc import Sequence
from typing import Any

from grpo_operator.convert.draft import Draft

DATA = "/data"  # where pods see the volume


def paths(value: Any) -> list[str]:
    """Return the paths of a list or of one path. Raises ValueError if there is none."""
    found = [str(each) for each in (value if isinstance(value, list) else [value]) if each]
    if not found:
        raise ValueError("name at least one file")
    return found


def place_data(draft: Draft) -> None:
    """Set the fields of the data from the fact ``files``."""
    files: list[str] = draft.fact("files", [])
    if not files:
        draft.errors.append("the configuration names no training data: add it, or --define it")
        return
    shorts = [_short(path) for path in files]
    pattern = _pattern(shorts)
    if not re.search(r"\.(parquet|jsonl|json)$", pattern):
        unknown = draft.options["files"].unknown if "files" in draft.options else None
        draft.refuse("files", unknown or "name Parquet, .jsonl or .json files")
        return
    draft.take("data.train", f"{DATA}/{pattern}")
    listed = ", ".join(f"{path} as {short}" for path, short in zip(files, shorts, strict=True))
    draft.choose("data.volume", {"mountPath": DATA, "pvc": "datasets"}, f"copy into this claim: {listed}")
    if "*" in pattern and "*" not in "".join(shorts):
        draft.chosen.append(
            f"data.train: {DATA}/{pattern}: one pattern for all files: it must match no others"
        )


def _short(path: str) -> str:
    """Return the last directory and the name of a file, without what only the old machine knows."""
    parts = [part for part in path.split("/") if part and not re.search(r"[$~({]", part)]
    return "/".join(parts[-2:]) if len(parts) > 1 else (parts or [path])[0]


def _pattern(files: Sequence[str]) -> str:
    """Return one glob pattern for several files."""
    split = [file.split("/") for file in files]
    if len({len(parts) for parts in split}) > 1:
        split = [parts[-1:] for parts in split]
    columns = zip(*split, strict=True)
    return "/".join(column[0] if len(set(column)) == 1 else _common(column) for column in columns)


def _common(names: Sequence[str]) -> str:
    """Return a pattern for file names that differ; it keeps their extension."""
    extensions = {name.rsplit(".", 1)[-1] for name in names if "." in name}
    return f"*.{extensions.pop()}" if len(extensions) == 1 and all("." in name for name in names) else "*"
