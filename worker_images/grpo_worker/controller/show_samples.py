"""Program: prints samples of a step as JSON lines, in a controller's pod or where the store is mounted."""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from grpo_worker.common.store_path import JobFolder, StorePath
from grpo_worker.controller.config import load_job_config
from grpo_worker.samples.reader import samples


def main(arguments: list[str] | None = None) -> None:
    """Print the samples that the options select; exit with 1 and a message if there are none."""
    options = _parser().parse_args(arguments)
    folder = options.folder or _of_this_pod()
    try:
        found = samples(
            folder, options.step, options.prompt, options.order, options.tokens,
            validation=options.validation, of=options.set,
        )  # fmt: skip
        for sample in islice(found, options.limit):
            print(json.dumps(sample, default=str))
    except LookupError as error:
        sys.exit(str(error))


def _of_this_pod() -> StorePath:
    config = load_job_config()
    return JobFolder.of(config.spec.checkpoint.store, config.store).store


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of a job; default: of this pod's job")
    parser.add_argument("--step", type=int, help="default: the last step that has samples")
    parser.add_argument("--validation", action="store_true", help="of the validation of a step's weights")
    parser.add_argument("--set", metavar="NAME", help="only of this validation set")
    parser.add_argument("--prompt", type=int, metavar="INDEX", help="only the answers to one prompt")
    parser.add_argument(
        "--order", default="", metavar="COLUMN", help="smallest first; -COLUMN: largest first"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="number of samples; default: all")
    parser.add_argument("--tokens", action="store_true", help="with ids and log-probabilities of all tokens")
    return parser


if __name__ == "__main__":
    main()
