"""A real controller's loop with real ranks, as a process that can get SIGTERM; only engines are stand-ins.

    python departing_job.py FOLDER STEPS [--store STORE] [--cluster ADDRESS NODE]

joins the Ray cluster at ADDRESS through its node with the IP address NODE, or starts one of its own. It
prints a line when it generates for a step, and when ranks begin an update. Raises at once if Ray is missing.
STORE: checkpoint.store as JSON; default: the folder.
"""

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

import ray

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.training.gang import TrainerGang
from support.loop_world import World
from support.objects import job

RANKS = 2
_STARTS = 8


class RealRanks(World):
    """A job whose ranks are Megatron-Core's, in Ray actors."""

    def __init__(self, disk: Path, steps: int, store: dict[str, str] | None) -> None:
        # The stand-in engines invent their log-probabilities.
        algorithm = job()["spec"]["algorithm"] | {"maxLogProbGap": 100}
        super().__init__(disk, steps, algorithm=algorithm)
        if store is not None:
            checkpoint = self.spec.wire()["checkpoint"] | {"store": store, "everySteps": 2}
            self.spec = GRPOJobSpec.model_validate(self.spec.wire() | {"checkpoint": checkpoint})
            self.folder = JobFolder.of(self.spec.checkpoint.store, disk)
        self.before_generation = lambda version: print(f"generates {version}", flush=True)

    def gang(self, hf: dict[str, Any]) -> TrainerGang:
        gang = TrainerGang(self.spec, hf, self.folder.store / "checkpoints", disk=self.folder.disk)
        call = gang.call

        def told(method: str, *arguments: Any) -> Any:
            if method == "update_actor":
                print(f"updates {self.loop._step + 1}", flush=True)
            return call(method, *arguments)

        gang.call = told  # type: ignore[method-assign]
        return gang


def _start_ray() -> None:
    """Start Ray, whose raylet gives up on a busy machine, as a pod's shell does: again and again."""
    for left in reversed(range(_STARTS)):
        try:
            ray.init(
                address="local", num_cpus=RANKS, resources={"trainer": RANKS}, include_dashboard=False,
                log_to_driver=False,
            )  # fmt: skip
        except Exception:  # Ray raises nothing more special
            if not left:
                raise
            logging.exception("Ray did not start")
            ray.shutdown()
        else:
            return


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--store", type=json.loads)
    parser.add_argument("--cluster", nargs=2)
    args = parser.parse_args()
    if args.cluster:
        address, node = args.cluster
        ray.init(address=address, _node_ip_address=node, log_to_driver=False)
    else:
        _start_ray()
    world = RealRanks(args.folder, args.steps, args.store)
    world.departure.listen()
    try:
        world.run()
    except SystemExit:
        print("nothing to save", flush=True)
    status = world.board.get()
    print(f"{status.phase} {status.step}: {status.message}", flush=True)
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
