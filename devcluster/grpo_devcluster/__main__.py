"""Command line of the devcluster: ``python -m grpo_devcluster prepare|env|up|down``."""

import sys

from grpo_devcluster import cluster
from grpo_devcluster.packages import sync_environment
from grpo_devcluster.paths import KUBECONFIG
from grpo_devcluster.stages import StageError, fail


def main() -> None:
    """Run one command; on failure print the step, the cause and the remedy."""
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        if command == "prepare":
            cluster.prepare()
        elif command == "env":
            sync_environment()
        elif command == "up":
            cluster.prepare()
            cluster.up()
            print(f"export KUBECONFIG={KUBECONFIG}")
        elif command == "down":
            cluster.down()
        else:
            sys.exit(f"usage: python -m grpo_devcluster prepare|env|up|down (not {command!r})")
    except StageError as error:
        fail(error)


if __name__ == "__main__":
    main()
