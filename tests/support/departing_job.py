"""A real controller's loop with real ranks, as a process that can get SIGTERM; only engines are stand-ins.

    python departing_job.py FOLDER STEPS [--store STORE] [--changes SPEC] [--cluster ADDRESS NODE]

joins the Ray cluster at ADDRESS through its node with the IP address NODE, or starts one of its own. It
prints a line when it generates for a step, and when ranks begin an update. Raises at once if Ray is missing.
STORE: checkpoint.store as JSON; default: the folder. SPEC: fields of the job's spec as JSON.
"""

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.training.gang import TrainerGang
from support.clocks import FakeClock
from support.loop_world import World
from support.objects import job

RANKS = 2


class RealTime(FakeClock):
    """The machine's clock; engines, which take no time, add to ``time`` for nothing."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class RealRanks(World):
    """A job whose ranks are Megatron-Core's, in Ray actors."""

    def __init__(self, disk: Path, steps: int, store: dict[str, str] | None, **changes: Any) -> None:
        # The stand-in engines invent their log-probabilities.
        algorithm = job()["spec"]["algorithm"] | {"maxLogProbGap": 100}
        super().__init__(disk, steps, algorithm=algorithm, **changes)
        self.clock = RealTime()
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
                print(f"updates {self.loop.state.step + 1}", flush=True)
            return call(method, *arguments)

        gang.call = told  # type: ignore[method-assign]
        return gang


def main(kind: type[RealRanks] = RealRanks) -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--store", type=json.loads)
    parser.add_argument("--changes", type=json.loads, default={})
    parser.add_argument("--cluster", nargs=2)
    args = parser.parse_args()
    _start_ray(args.cluster)
    world = kind(args.folder, args.steps, args.store, **args.changes)
    world.departure.listen()
    try:
        world.run()
    except SystemExit:
        print("nothing to save", flush=True)
    status = world.board.get()
    print(f"{status.phase} {status.step}: {status.message}", flush=True)
    ray.shutdown()
    os._exit(0)


def _start_ray(cluster: list[str] | None, tries: int = 4) -> None:
    """Join a Ray cluster, or start one of this process.

    On a busy machine its node may not answer within Ray's 30 s.
    """
    if cluster:
        ray.init(address=cluster[0], _node_ip_address=cluster[1], log_to_driver=False)
        return
    for left in reversed(range(tries)):
        try:
            ray.init(
                address="local", num_cpus=RANKS, resources={"trainer": RANKS}, include_dashboard=False,
                log_to_driver=False,
            )  # fmt: skip
            return
        except Exception:  # Ray raises no other type
            ray.shutdown()
            if not left:
                raise


if __name__ == "__main__":
    main()
