"""``grpo-plan MANIFEST``: prints the operator's plan for a GRPOJob, without a cluster."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_operator.api import manifest_yaml
from grpo_operator.api.errors import describe
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.cli.manifest import Manifest
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.planner.step.job import Assumptions, with_efficiency

_SIGMA = Assumptions().sigma


def main(arguments: list[str] | None = None) -> int:
    """Print the plan of each GRPOJob in a manifest; return 1 when one is refused, 2 for bad input."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--rehearse" in given:
        return _rehearse([argument for argument in given if argument != "--rehearse"])
    parser = argparse.ArgumentParser(prog="grpo-plan", description=__doc__)
    parser.add_argument("manifest", type=Path, help="YAML file with one or more GRPOJobs")
    parser.add_argument("-o", "--output", choices=("text", "json", "yaml"), default="text")
    parser.add_argument(
        "--json", dest="output", action="store_const", const="json", help="the same as --output json"
    )
    parser.add_argument(
        "--rehearse", action="store_true",
        help="run the first step with the real controller on virtual time; see --rehearse --help",
    )  # fmt: skip
    parser.add_argument(
        "--store-gigabytes-per-second", type=float, default=5.0, metavar="GB/S",
        help="write speed of one node to the checkpoint store (default 5)",
    )  # fmt: skip
    _add_assumptions(parser)
    options = parser.parse_args(arguments)
    assumed = _assumptions(options)
    try:
        manifest = Manifest.read(options.manifest)
    except (OSError, ValueError) as error:
        print(f"grpo-plan: {error}", file=sys.stderr)
        return 2
    plans: list[dict[str, Any]] = []
    refused = False
    for name, body in manifest.jobs:
        try:
            store = options.store_gigabytes_per_second * 1e9
            plans.append({"name": name, **_plan(body, manifest, store, assumed)})
        except (RefusedError, ValueError) as error:
            text = describe(error) if isinstance(error, ValidationError) else str(error)
            plans.append({"name": name, "refused": text})
            refused = True
    print(_printed(plans, options.output))
    return int(refused)


def _rehearse(arguments: list[str]) -> int:
    """Hand over to the rehearsal, which needs the worker's packages and is no part of the operator."""
    try:
        rehearsal = import_module("grpo_rehearsal.main")
    except ModuleNotFoundError as error:
        print(f"grpo-plan: --rehearse needs a checkout after `make env`: {error}", file=sys.stderr)
        return 2
    return int(rehearsal.main(arguments))


def _plan(
    body: dict[str, Any], manifest: Manifest, store_speed: float, assumed: Assumptions
) -> dict[str, Any]:
    spec = GRPOJobSpec.model_validate(body)
    pool = manifest.pool_of(spec)
    return as_data(spec, pool, resolve(spec, pool), store_speed, assumed)


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("assumptions of the expected step")
    for name, text in (
        ("mean-prompt", "mean tokens of a prompt (default: 30 %% of promptLength)"),
        ("mean-response", "mean tokens of a response (default: 30 %% of responseLength)"),
        ("response-sigma", "standard deviation of the logarithm of a response's length (default 0.8)"),
        ("training-efficiency", "share of the peak bf16 rate at which the trainer's kernels compute"),
        ("generation-efficiency", "share of the peak bf16 rate at which an engine's matrix products compute"),
        ("memory-efficiency", "share of the peak rate of GPU memory"),
        ("link-efficiency", "share of the peak rates of NVLink and network"),
    ):
        group.add_argument(f"--{name}", type=float, metavar="NUMBER", help=text)


def _assumptions(options: argparse.Namespace) -> Assumptions:
    sigma = _SIGMA if options.response_sigma is None else options.response_sigma
    return with_efficiency(
        Assumptions(options.mean_prompt, options.mean_response, sigma),
        flops=options.training_efficiency,
        engine_flops=options.generation_efficiency,
        memory=options.memory_efficiency,
        link=options.link_efficiency,
    )


def _printed(plans: list[dict[str, Any]], output: str) -> str:
    if output == "text":
        return "\n\n".join(map(_text, plans))
    text = json.dumps(plans, indent=2)
    # YAML has other types than the models, whose enumerations JSON writes as texts.
    return text if output == "json" else manifest_yaml.dump(json.loads(text)).rstrip()


def _text(plan: dict[str, Any]) -> str:
    title = f"GRPOJob {plan['name']}"
    if "refused" in plan:
        return f"{title}\nrefused: {plan['refused']}"
    return f"{title}\n{as_table(plan)}"


if __name__ == "__main__":
    sys.exit(main())
