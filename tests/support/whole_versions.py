"""A process that fetches whole versions, as an agent with deltas does."""

import importlib
import sys

from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs


def main(url: str, ranks: int) -> None:
    """Fetch the versions that stdin names from the trainers' agent at ``url``; print the bytes received."""
    importlib.import_module("grpo_worker.weightsync.agent.agent")  # an agent has this code in memory
    fetcher = Fetcher(60, WholeBlobs(60, deltas=True))
    sources = dict.fromkeys(range(ranks), url)
    for line in sys.stdin:
        fetcher.blobs(sources, fetcher.manifests(sources, int(line)))
        print(fetcher.received, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
