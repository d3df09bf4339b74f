"""``make test``: every level in order, with the time of each; stops at the first that fails.

The times are written to build/results/demo.json, with GRPO_RECORD=1 to benchmarks/results/demo.json.
"""

import os
import subprocess
import time

from grpo_devcluster import cluster
from grpo_devcluster.gobuild import everything_built
from grpo_devcluster.paths import REPO
from grpo_devcluster.results import record_from_test
from grpo_devcluster.stages import StageError, fail

LEVELS = ("lint", "unit", "worker", "integration", "e2e")


def main() -> None:
    """Set up, run the levels, remove the cluster; exit 1 on failure."""
    started = time.monotonic()
    cold = not everything_built()
    seconds: dict[str, float] = {}
    try:
        cluster.prepare()
        cluster.down()  # remains of a run that was killed
        seconds["setup"] = time.monotonic() - started
        for level in LEVELS:
            # Where a time limit ends the run, only the end of the output may be kept.
            print(f"==> {level} (so far {_table(seconds)})", flush=True)
            seconds[level] = _level(level)
    except StageError as error:
        fail(error)
    finally:
        cluster.down()
    total = time.monotonic() - started
    for level, value in seconds.items():
        print(f"{level:<12}{value:7.1f} s")
    print(f"{'total':<12}{total:7.1f} s ({'cold' if cold else 'warm'})")
    name = "test_cold_seconds" if cold else "test_warm_seconds"
    record_from_test("demo", {name: round(total, 1), "unit_seconds": round(seconds["unit"], 1)})


def _table(seconds: dict[str, float]) -> str:
    return ", ".join(f"{level} {value:.0f} s" for level, value in seconds.items())


def _level(level: str) -> float:
    started = time.monotonic()
    # The levels use the embedded cluster whatever the user's own KUBECONFIG says.
    env = {k: v for k, v in os.environ.items() if k != "KUBECONFIG"}
    done = subprocess.run(["make", "--no-print-directory", level], cwd=REPO, env=env, check=False)
    if done.returncode:
        raise StageError(f"level {level} failed; run `make {level}` alone to look closer")
    return time.monotonic() - started


if __name__ == "__main__":
    main()
