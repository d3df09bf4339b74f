"""The trainer's tests with a later Megatron-Core: ``... -m grpo_devcluster.megatron_next PYTHON [FILE]``."""

import os
import subprocess
import sys
from pathlib import Path

from grpo_devcluster.packages import megatron_next
from grpo_devcluster.paths import REPO
from grpo_devcluster.stages import StageError, fail

_SOURCES = ("devcluster", "operator", "worker_images", "rehearsal", "tests")
_TESTS = (
    "megatron_versions", "megatron", "mtp", "recompute", "router", "replay", "context_parallel", "critic",
    "loading", "kernels", "token_dispatcher", "overlap", "expert_overlap",
)  # fmt: skip


def main() -> None:
    """Install the environment if needed, and run the tests in it."""
    python, *arguments = sys.argv[1:]
    try:
        later = megatron_next(python)
    except StageError as error:
        fail(error)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(REPO / source) for source in _SOURCES),
        "GRPO_LOCKED_PYTHON": str(REPO / ".venv" / "bin" / "python"),
    }
    files = arguments or [str(Path("tests/worker") / f"test_{name}.py") for name in _TESTS]
    command = [str(later), "-m", "pytest", *files, "-v", "-m", "not slow"]
    sys.exit(subprocess.run(command, cwd=REPO, env=env, check=False).returncode)


if __name__ == "__main__":
    main()
