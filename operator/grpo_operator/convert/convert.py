"""A GRPOJob manifest from a configuration of another framework, and a report of what became of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from grpo_operator.api.base import API_VERSION, LONGEST_NAME
from grpo_operator.api.errors import describe
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.draft import Draft
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.fields.finish import finish
from grpo_operator.convert.nemo_rl.fill import fill as fill_nemo_rl
from grpo_operator.convert.reading.readers import read
from grpo_operator.convert.reading.source import Framework
from grpo_operator.convert.slime.fill import fill as fill_slime
from grpo_operator.convert.verl.fill import fill as fill_verl
from grpo_operator.plan.planner.resolve import RefusedError, resolve

_FILL = {Framework.VERL: fill_verl, Framework.SLIME: fill_slime, Framework.NEMO_RL: fill_nemo_rl}
_REFUSED = "the planner refuses the job"
_MORE = "see also --nodes, --rollout-nodes and --gpu-type"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A manifest, and what became of the source's options, a line each."""

    manifest: dict[str, Any]
    taken: tuple[str, ...]
    chosen: tuple[str, ...]
    missing: tuple[str, ...]


def convert(
    framework: Framework,
    texts: Sequence[str],
    choices: Choices,
    given: Mapping[str, str],
    strict: bool = False,
) -> Conversion:
    """Convert a configuration: ``texts`` are what it inherits from, in order, and itself.

    ``given``: values of variables that it does not set. ``strict``: refuse every option without counterpart.
    Raises ConvertError with a line for each reason.
    """
    source = read(framework, texts, given)
    draft = Draft()
    _FILL[framework](draft, source)
    draft.missing += source.notes
    finish(draft, choices)
    errors = [*draft.errors, *(draft.missing if strict else ())]
    if errors:
        if framework is Framework.VERL:
            errors += source.notes  # options that were not read may be what is missing
        raise ConvertError("\n".join(dict.fromkeys(errors)))
    spec = _checked(draft)
    name = _name(choices.name or str(draft.fact("name", "")), draft)
    manifest = {"apiVersion": API_VERSION, "kind": "GRPOJob", "metadata": {"name": name}, "spec": spec}
    return Conversion(manifest, tuple(draft.taken), tuple(draft.chosen), tuple(draft.missing))


def _checked(draft: Draft) -> dict[str, Any]:
    """Return the spec if the API and the planner accept it. Raises ConvertError.

    Where only the source's layout is refused, the planner chooses another, which trains the same.
    """
    body = draft.spec()
    try:
        return _planned(body)
    except ConvertError as error:
        trainer = body["trainer"] | {"parallelism": {"auto": True}}
        if "architecture" not in body["model"] or trainer == body["trainer"]:
            raise
        refused = error
    try:
        planned = _planned(body | {"trainer": trainer})
    except ConvertError as error:
        # The error of the first attempt is about what the source says.
        raise (error if "parallelism.auto" in str(error) else refused) from refused
    reason = str(refused).removeprefix(f"{_REFUSED}: ").removesuffix(f": {_MORE}")
    draft.chosen.append(f"trainer.parallelism.auto: true: the source's sizes do not fit: {reason}")
    return planned


def _planned(body: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, in the order of the reference. Raises ConvertError."""
    try:
        spec = GRPOJobSpec.model_validate(body)
    except ValidationError as error:
        raise ConvertError(f"the job would not be accepted: {describe(error)}") from error
    assert spec.rollout.template is not None
    try:
        resolve(spec, spec.rollout.template)
    except RefusedError as error:
        raise ConvertError(f"{_REFUSED}: {error}: {_MORE}") from error
    order = [field.alias for field in GRPOJobSpec.model_fields.values()]
    return dict(sorted(body.items(), key=lambda item: order.index(item[0])))


def _name(given: str, draft: Draft) -> str:
    """Return a name that Kubernetes accepts."""
    known = "" if "$" in given else given
    model = str(draft.fields.get("model.path", "job")).rsplit("/", 1)[-1]
    name = re.sub(r"[^a-z0-9]+", "-", (known or model).lower()).strip("-")[:LONGEST_NAME].strip("-")
    name = name if name[:1].isalpha() else f"grpo-{name}"[:LONGEST_NAME].strip("-")
    if not known:
        draft.chosen.append(f"metadata.name: {name}: the source has no name that is known: add --name NAME")
    return name
