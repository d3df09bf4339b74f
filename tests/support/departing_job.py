"""A real controller's loop with real ranks, as a process that can get SIGTERM; only engines are stand-ins.

    python departing_job.py FOLDER STEPS [ADDRESS NODE]

joins the Ray cluster at ADDRESS through its node with the IP address NODE, or starts one of its own. It
prints a line when it generates for a step, and when ranks begin an update. Raises at once if Ray is missing.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray

from grpo_worker.controller.training.gang import TrainerGang
from support.loop_world import World
from support.objects import job

RANKS = 2


class RealRanks(World):
    """A job whose ranks are Megatron-Core's, in Ray actors."""

    def __init__(self, store: Path, steps: int) -> None:
        # The stand-in engines invent their log-probabilities.
        algorithm = job()["spec"]["algorithm"] | {"maxLogProbGap": 100}
        super().__init__(store, steps, algorithm=algorithm)
        self.before_generation = lambda version: print(f"generates {version}", flush=True)

    def gang(self, hf: dict[str, Any]) -> TrainerGang:
        gang = TrainerGang(self.spec, hf, self.store / "checkpoints")
        call = gang.call

        def told(method: str, *arguments: Any) -> Any:
            if method == "update_actor":
                print(f"updates {self.loop._step + 1}", flush=True)
            return call(method, *arguments)

        gang.call = told  # type: ignore[method-assign]
        return gang


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    store, steps, cluster = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if cluster:
        ray.init(address=cluster[0], _node_ip_address=cluster[1], log_to_driver=False)
    else:
        ray.init(
            address="local", num_cpus=RANKS, resources={"trainer": RANKS}, include_dashboard=False,
            log_to_driver=False,
        )  # fmt: skip
    world = RealRanks(store, steps)
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
