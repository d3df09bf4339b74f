"""Program: prints the page of a run, or its data, in a controller's pod or where the store is mounted."""

import argparse
import json
import os
import sys
from pathlib import Path

from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.config import load_job_config
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.model_files.errors import ModelFilesError
from grpo_worker.run_page.html import page
from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.samples import step_samples
from grpo_worker.run_page.snapshot import Run, snapshot
from grpo_worker.run_page.token_texts import Decode


def main(arguments: list[str] | None = None) -> None:
    """Print what the options select; exit with 1 and a message if there are no such samples."""
    options = _parser().parse_args(arguments)
    run = _run(options)
    try:
        text = _text(run, options)
    except LookupError as error:
        sys.exit(str(error))
    if options.output is None:
        sys.stdout.buffer.write(text.encode())
    else:
        options.output.write_text(text, encoding="utf-8")


def _text(run: Run, options: argparse.Namespace) -> str:
    if options.step is not None:
        found = step_samples(run.folder.store, options.step, options.prompt, run.decode, Limits())
        return json.dumps(found)
    data = snapshot(run)
    return json.dumps(data, allow_nan=False) if options.data else page(data, options.live)


def _run(options: argparse.Namespace) -> Run:
    if options.folder is not None:
        folder = JobFolder(options.folder, options.folder)
        return Run(options.folder.name, folder, options.total, _decode(options.model))
    config = load_job_config()
    return Run.of(config, _decode(config.spec.model.path))


def _decode(model: str | None) -> Decode | None:
    """Return what makes text of a model's tokens; None if its tokenizer cannot be read here."""
    try:
        return None if model is None else load_tokenizer(model).decode_all
    except ModelFilesError as error:
        print(f"{error}: tokens are shown as their ids", file=sys.stderr)
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of a job; default: of this pod's job")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a file instead")
    parser.add_argument("--model", metavar="PATH", help="with FOLDER: the model, for texts of tokens")
    parser.add_argument("--total", type=int, metavar="N", help="with FOLDER: the job's totalSteps")
    parser.add_argument("--data", action="store_true", help="the data as JSON instead of the page")
    parser.add_argument("--live", action="store_true", help="a page that asks its server for new steps")
    parser.add_argument("--step", type=int, metavar="N", help="only the samples of a step, as JSON")
    parser.add_argument("--prompt", type=int, metavar="INDEX", help="with --step: only of one prompt")
    return parser


if __name__ == "__main__":
    os.nice(10)  # beside a controller
    main()
