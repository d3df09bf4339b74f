"""``grpo-plan --rehearse MANIFEST``: rehearse the first steps of a job with the real controller."""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from pydantic import ValidationError

from grpo_operator.api.errors import describe
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_rehearsal.durations import Assumptions
from grpo_rehearsal.job import RehearsedJob, read_job
from grpo_rehearsal.report.picture import draw
from grpo_rehearsal.report.summary import summary
from grpo_rehearsal.report.text import as_text
from grpo_rehearsal.run import rehearse
from grpo_rehearsal.scenario import Scenario, parse_pair


def main(arguments: list[str] | None = None) -> int:
    """Rehearse the job of a manifest, print the report, and write it; return 1 when the job did not succeed.

    Returns 2 for bad input.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        job, scenario = _job(options), _scenario(options)
        with tempfile.TemporaryDirectory() as folder:
            outcome = rehearse(job, scenario, Path(folder))
    except ValidationError as error:
        print(f"grpo-plan: {describe(error)}", file=sys.stderr)
        return 2
    except (OSError, ValueError, RefusedError) as error:
        print(f"grpo-plan: {error}", file=sys.stderr)
        return 2
    figures = summary(outcome)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        name = f"{job.name}-{scenario.name}"
        (options.output / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
        draw(outcome, figures, options.output / f"{name}.svg")
    print(json.dumps(figures, indent=1) if options.json else as_text(figures))
    return int(figures["phase"] != "Succeeded")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo-plan --rehearse", description=__doc__)
    parser.add_argument("manifest", type=Path, help="YAML file with a GRPOJob")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the report and a picture there")
    parser.add_argument("--verbose", action="store_true", help="show the controller's log")
    parser.add_argument("--name", default="calm", help="name of the scenario (default calm)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps to rehearse (default 1)")
    parser.add_argument("--engines", type=int, metavar="N", help="engines instead of the manifest's number")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="prompts of a step instead of the manifest's"
    )
    parser.add_argument(
        "--running", type=int, metavar="N", help="requests that run in an engine instead of the manifest's"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="steps between two checkpoints instead of its own"
    )
    parser.add_argument(
        "--mean-response", type=float, metavar="TOKENS",
        help="mean length of the responses (default: 30 %% of data.responseLength)",
    )  # fmt: skip
    parser.add_argument(
        "--sigma", type=float, default=Assumptions().sigma,
        help="standard deviation of the logarithm of response lengths: the larger, the longer the tail",
    )  # fmt: skip
    parser.add_argument(
        "--store-gigabytes-per-second", type=float, default=Assumptions().store_rate / 1e9, metavar="GB/S",
        help="speed of one node to the checkpoint store and the model's files (default 5)",
    )  # fmt: skip
    for option, value, text in (
        ("--kill-engine", "ENGINE:SECONDS", "an engine dies"),
        ("--slow-engine", "ENGINE:FACTOR", "an engine takes longer"),
        ("--late-engine", "ENGINE:SECONDS", "the pod of an engine comes later"),
        ("--late-agent", "ENGINE:SECONDS", "the agent of an engine answers later"),
        ("--slow-rank", "RANK:FACTOR", "a rank takes longer for its passes"),
        ("--lose-node", "NODE:SECONDS", "a training pod is lost"),
    ):
        parser.add_argument(option, metavar=value, help=text, type=parse_pair, default=[], action="append")
    parser.add_argument("--routing-replay", action="store_true", help="replay the engines' routing")
    parser.add_argument("--lose-head", type=float, metavar="SECONDS", help="Ray's head is lost")
    parser.add_argument("--hang-rank", type=parse_pair, metavar="RANK:SECONDS", help="a rank stands still")
    return parser


def _job(options: argparse.Namespace) -> RehearsedJob:
    return read_job(
        options.manifest, options.engines, options.prompts, options.routing_replay, options.running,
        options.checkpoint_every,
    )  # fmt: skip


def _scenario(options: argparse.Namespace) -> Scenario:
    return Scenario(
        name=options.name,
        steps=options.steps,
        engine_deaths=tuple(options.kill_engine),
        slow_engines=tuple(options.slow_engine),
        late_engines=tuple(options.late_engine),
        late_agents=tuple(options.late_agent),
        slow_ranks=tuple(options.slow_rank),
        hung_rank=options.hang_rank,
        dead_nodes=tuple(options.lose_node),
        lost_head=options.lose_head,
        assumed=Assumptions(
            mean_response=options.mean_response,
            sigma=options.sigma,
            store_rate=options.store_gigabytes_per_second * 1e9,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
