"""``ray start`` for nodes with other work: ``python -m grpo_worker.roles.ray_start ARGUMENTS``.

Ray gives up when its own processes have not started after 30 seconds, and what it has started until then is
lost. Where many pods of a job start on few cores, that takes longer.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from grpo_worker.common.clock import SYSTEM_CLOCK, Clock

PATIENCE = 300.0  # seconds
_PAUSE, _RETRY = 0.5, 2  # seconds between two looks, and those of Ray
Ask = Callable[[str, str], Any]  # (address of the GCS, id of a node) -> the node


def patient(ask: Ask, clock: Clock = SYSTEM_CLOCK) -> Ask:
    """Return ``ask`` with repetitions while it raises RuntimeError: the GCS knows no such node yet."""

    def ask_on(gcs_address: str, node_id: str) -> Any:
        deadline = clock.now() + PATIENCE
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:
                if clock.now() >= deadline:
                    raise
            clock.sleep(_PAUSE)

    return ask_on


def main() -> None:
    """Run ``ray start`` with the arguments of this process."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", f"{PATIENCE:.0f}")  # of the raylet for its agents
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", f"{PATIENCE / _RETRY:.0f}")  # until there is a head
    from ray._private import services
    from ray.scripts.scripts import cli

    services.get_node = patient(services.get_node)
    cli(["start", *sys.argv[1:]])


if __name__ == "__main__":
    main()
