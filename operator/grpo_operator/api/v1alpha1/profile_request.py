"""A request to profile a running job, as written in the annotation ``rl.grpo.dev/profile``."""

import json
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from grpo_operator.api.base import Model, ShortString
from grpo_operator.api.errors import describe
from grpo_operator.api.names import PROFILE_ANNOTATION

LONGEST_REQUEST = 1024  # characters of the annotation
_TRAINER_STEPS, _ENGINE_STEPS = 1, 10  # that are traced where the request sets none
_GRAMMAR = (
    "write TOOL [TARGET] [FIELD=VALUE ...], such as 'torch trainer ranks=0,1 steps=2', 'torch engines' or "
    "'py-spy controller seconds=10', or a JSON object with these fields"
)


class ProfileTool(StrEnum):
    """Program that records a profile."""

    TORCH = "torch"
    NSIGHT = "nsight"
    PY_SPY = "py-spy"


class ProfileTarget(StrEnum):
    """Processes of a job that are profiled."""

    TRAINER = "trainer"
    ENGINES = "engines"
    CONTROLLER = "controller"


_TARGETS = {
    ProfileTool.TORCH: (ProfileTarget.TRAINER, ProfileTarget.ENGINES),
    ProfileTool.NSIGHT: (ProfileTarget.TRAINER,),
    ProfileTool.PY_SPY: (ProfileTarget.TRAINER, ProfileTarget.CONTROLLER),
}


class ProfileRequest(Model):
    """Processes to profile, the tool, and the length of the profile.

    ``ranks``: of the trainer. ``engines``: names of engines; None: one that serves. ``steps``: training
    steps, or forward passes of an engine. ``seconds``: py-spy samples so long; None: it writes each stack
    once.
    """

    from_text = True
    tool: ProfileTool = ProfileTool.TORCH
    target: ProfileTarget = ProfileTarget.TRAINER
    ranks: list[Annotated[int, Field(ge=0, le=65535)]] | None = Field(None, min_length=1, max_length=64)
    engines: list[ShortString] | None = Field(None, min_length=1, max_length=8)
    steps: int | None = Field(None, ge=1, le=100)
    seconds: int | None = Field(None, ge=1, le=600)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Refuse fields that have no meaning for the tool and the target."""
        targets = _TARGETS[self.tool]
        if self.target not in targets:
            raise ValueError(f"tool {self.tool} has no target {self.target}: use {' or '.join(targets)}")
        for name, target in (("ranks", ProfileTarget.TRAINER), ("engines", ProfileTarget.ENGINES)):
            if getattr(self, name) is not None and self.target is not target:
                raise ValueError(f"{name} needs target {target}, not {self.target}: remove it")
        if self.steps is not None and self.tool is ProfileTool.PY_SPY:
            raise ValueError("py-spy counts no steps: use seconds instead of steps")
        if self.seconds is not None and self.tool is not ProfileTool.PY_SPY:
            raise ValueError(f"{self.tool} counts steps: use steps instead of seconds")
        return self

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """Return the trainer ranks to profile, ascending."""
        return tuple(sorted(set(self.ranks or [0])))

    @property
    def traced_steps(self) -> int:
        """Return the number of steps to trace."""
        return self.steps or (_TRAINER_STEPS if self.target is ProfileTarget.TRAINER else _ENGINE_STEPS)


def parse_request(text: str) -> ProfileRequest:
    """Read the annotation's value. Raises ValueError that names the field, its value and the grammar."""
    if len(text) > LONGEST_REQUEST:
        raise ValueError(
            f"{PROFILE_ANNOTATION}: the value has more than {LONGEST_REQUEST} characters: shorten it"
        )
    fields = _json(text) if text.lstrip().startswith("{") else _words(text)
    try:
        return ProfileRequest.model_validate(fields)
    except ValidationError as error:
        raise ValueError(describe(error, PROFILE_ANNOTATION)) from None


def _json(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{PROFILE_ANNOTATION}: {text!r} is no JSON object ({error}): {_GRAMMAR}") from None


def _words(text: str) -> dict[str, Any]:
    """Return the fields of the short form. A word alone is a tool or a target."""
    fields: dict[str, Any] = {}
    for word in text.split():
        name, has_value, value = word.partition("=")
        if has_value:
            given: Any = value.split(",") if name in ("ranks", "engines") else value
        elif word in list(ProfileTool):
            name, given = "tool", word
        elif word in list(ProfileTarget):
            name, given = "target", word
        else:
            raise ValueError(f"{PROFILE_ANNOTATION}: {word!r} is no tool and no target: {_GRAMMAR}")
        if name in fields:
            raise ValueError(f"{PROFILE_ANNOTATION}: {text!r} gives {name} twice: {_GRAMMAR}")
        fields[name] = given
    if not fields:
        raise ValueError(f"{PROFILE_ANNOTATION}: the value is empty: {_GRAMMAR}")
    return fields
