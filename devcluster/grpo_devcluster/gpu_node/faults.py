"""Runs benchmarks/gpu/faults.py in the background, and follows it from one call to the next.

    python -m grpo_devcluster.gpu_node.faults FOLDER start OUT MANIFEST STEPS [FAULT...]
    python -m grpo_devcluster.gpu_node.faults FOLDER follow OUT SECONDS

FOLDER: where the work and its results stay. OUT: where results and logs are copied to. ``start`` exits 1 if
the work fails in its first seconds; ``follow`` exits 0 when the work has ended, and 3 while it runs.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from grpo_devcluster.addons import kubectl
from grpo_devcluster.gpu_node.background import Work
from grpo_devcluster.paths import KUBECONFIG, REPO
from grpo_devcluster.results import commit_id
from grpo_devcluster.stages import StageError, fail

RUNS = 3  # exit code
_FIRST_SECONDS = 20  # wrong arguments are found by then
_EVERY = 2.0  # seconds between two looks at the log
_TABLES = 60.0  # seconds between two looks at jobs and pods
_QUESTIONS = (("get", "grpojobs", "-A"), ("get", "pods"))


def main() -> None:
    """Start or follow."""
    args = arguments(sys.argv[1:])
    work = Work(args.folder.resolve() / "faults")
    try:
        if args.action == "start":
            work.start(REPO, command(work, args), {"GRPO_COMMIT": commit_id()})
            ended = follow(work, args.out, _FIRST_SECONDS)
            sys.exit(1 if ended and work.exit_code() != 0 else 0)
        if not work.started():
            raise StageError(f"{work.folder} has no work: run devcluster/gpu-node.sh faults first.")
        sys.exit(0 if follow(work, args.out, args.seconds) else RUNS)
    except StageError as error:
        fail(error)


def arguments(words: list[str]) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    actions = parser.add_subparsers(dest="action", required=True)
    start = actions.add_parser("start")
    start.add_argument("out", type=Path)
    start.add_argument("manifest", type=Path)
    start.add_argument("steps", type=int)
    start.add_argument("faults", nargs="*", help="all by default")
    following = actions.add_parser("follow")
    following.add_argument("out", type=Path)
    following.add_argument("seconds", type=float)
    return parser.parse_args(words)


def command(work: Work, args: argparse.Namespace, checkout: Path = REPO) -> list[str | Path]:
    """Return the command that runs a job without faults, then one with them, in the copy of the checkout."""
    manifest = args.manifest.resolve()
    if not manifest.is_file():
        raise StageError(f"{args.manifest} is not a file: name a manifest, as of manifests/gpu/.")
    if manifest.is_relative_to(checkout):  # which the next transfer replaces
        manifest = work.source / manifest.relative_to(checkout)
    line: list[str | Path] = [sys.executable, "benchmarks/gpu/faults.py", work.results, manifest]
    only = ["--only", *args.faults] if args.faults else []
    return [*line, "calm", "faulted", "--steps", str(args.steps), *only]


def follow(work: Work, out: Path, seconds: float) -> bool:
    """Print what the work does until it ends or the time is over, and copy its results.

    Return whether it has ended.
    """
    deadline, next_tables, read = time.monotonic() + seconds, time.monotonic() + _EVERY, 0
    while True:
        running = work.running()
        read = _print_new(work.log, read)
        if not running or time.monotonic() >= deadline:
            break
        if time.monotonic() >= next_tables:
            _print_tables()
            next_tables = time.monotonic() + _TABLES
        time.sleep(min(_EVERY, max(deadline - time.monotonic(), 0.0)))
    if running:
        _print_tables()
    shutil.copytree(work.results, out, dirs_exist_ok=True)
    print(_state(work, running, out), flush=True)
    return not running


def _state(work: Work, running: bool, out: Path) -> str:
    if running:
        return f"The work still runs. Results so far: {out}."
    code = work.exit_code()
    how = "was killed" if code is None else f"ended with exit code {code}"
    return f"The work {how}. Results: {out}."


def _print_new(log: Path, read: int) -> int:
    """Print what a log has after its first ``read`` bytes, and return its length."""
    with log.open("rb") as file:
        file.seek(read)
        new = file.read()
    if new:
        print(new.decode(errors="replace"), end="", flush=True)
    return read + len(new)


def _print_tables() -> None:
    """Print jobs and pods with their restarts; nothing while there is no API server."""
    for question in _QUESTIONS if KUBECONFIG.exists() else ():
        try:
            print(kubectl(*question), end="", flush=True)
        except StageError:
            return


if __name__ == "__main__":
    main()
