"""Validation sets of a configuration."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from grpo_operator.convert.draft import Draft
from grpo_operator.convert.fields.data import in_volume, is_readable

_LONGEST_NAME = 40


def named_files(value: Any) -> list[tuple[str, str]]:
    """Return pairs of a set's name and its file; a file alone has no name. Raises ValueError."""
    words = value if isinstance(value, list) else str(value).split()
    if len(words) == 1:
        return [("", words[0])]
    if not words or len(words) % 2:
        raise ValueError("write a name and a file for each set")
    return list(zip(words[::2], words[1::2], strict=True))


def place_validation(draft: Draft) -> None:
    """Set ``validation`` from the facts of the same name, if the source validates at all."""
    files: list[str] = draft.fact("validation_files", [])
    every = draft.fact("validation_every", 0)
    if not files or every <= 0:
        return
    if not any(f"reward.{kind}" in draft.fields for kind in ("function", "builtin", "url")):
        draft.lacks("validation_files", "a reward model scores no responses of a validation")
        return
    places = [in_volume(path) for path in files]
    if unreadable := [place for place in places if not is_readable(place)]:
        draft.lacks("validation_files", f"name Parquet, .jsonl or .json files, not {unreadable[0]}")
        return
    draft.take("validation.everySteps", every)
    names = _names(files, draft.fact("validation_names", []))
    sets = [{"name": name, "data": place} for name, place in zip(names, places, strict=True)]
    listed = ", ".join(f"{path} as {place}" for path, place in zip(files, places, strict=True))
    draft.choose("validation.sets", sets, f"copy into the claim of data.volume: {listed}")
    draft.take("validation.beforeTraining", draft.fact("validation_first", True))
    if length := draft.fact("validation_length"):
        draft.take("validation.responseLength", length)
    samples, sampling = draft.fact("validation_samples", 1), draft.fact("validation_sampling", False)
    if sampling:
        draft.take("validation.temperature", draft.fact("validation_temperature", 1.0))
        draft.take("validation.samplesPerPrompt", samples)
    elif samples > 1:
        draft.lacks(
            "validation_samples", "without sampling, all responses to a prompt are the same: there is one"
        )


def _names(files: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a name for each file: the given one or its own, and another where it is taken."""
    found: list[str] = []
    for number, file in enumerate(files):
        path = PurePosixPath(file)
        tries = [path.stem, f"{path.parent.name}-{path.stem}", f"{path.stem}-{number}", f"set-{number}"]
        names = [_short(name) for name in ([given[number]] if number < len(given) else []) + tries]
        found.append(next(name for name in names if name and name not in found))
    return found


def _short(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:_LONGEST_NAME].strip("-._")
