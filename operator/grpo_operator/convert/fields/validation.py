"""Validation sets of a configuration."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from grpo_operator.convert.draft import Draft
from grpo_operator.convert.fields.data import in_volume, is_readable

_LONGEST_NAME = 40


def place_validation(draft: Draft) -> None:
    """Set ``validation`` from the facts of the same name, if the source validates at all."""
    files: list[str] = draft.fact("validation_files", [])
    every = draft.fact("validation_every", 0)
    if not files or every <= 0:
        return
    places = [in_volume(path) for path in files]
    if unreadable := [place for place in places if not is_readable(place)]:
        draft.lacks("validation_files", f"name Parquet, .jsonl or .json files, not {unreadable[0]}")
        return
    draft.take("validation.everySteps", every)
    sets = [{"name": name, "data": place} for name, place in zip(_names(files), places, strict=True)]
    listed = ", ".join(f"{path} as {place}" for path, place in zip(files, places, strict=True))
    draft.choose("validation.sets", sets, f"copy into the claim of data.volume: {listed}")
    draft.take("validation.beforeTraining", draft.fact("validation_first", True))
    samples, sampling = draft.fact("validation_samples", 1), draft.fact("validation_sampling", False)
    if sampling:
        draft.take("validation.temperature", draft.fact("validation_temperature", 1.0))
        draft.take("validation.samplesPerPrompt", samples)
    elif samples > 1:
        draft.lacks(
            "validation_samples", "without sampling, all responses to a prompt are the same: there is one"
        )


def _names(files: Sequence[str]) -> list[str]:
    """Return a name for each file: its own, with its folder and a number where another has the same."""
    found: list[str] = []
    for file in files:
        path = PurePosixPath(file)
        for name in (path.stem, f"{path.parent.name}-{path.stem}", f"{path.stem}-{len(found)}"):
            short = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:_LONGEST_NAME].strip("-._")
            if short and short not in found:
                found.append(short)
                break
        else:
            found.append(f"set-{len(found)}")
    return found
