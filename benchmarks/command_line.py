"""Measure the start of ``kubectl grpo`` beside those of kubectl and a bare Python, and the size of its wheel.

Runs of each take turns, and the medians and the slowest runs are written to
benchmarks/results/experience.json. Run it on a quiet machine.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from grpo_devcluster.gobuild import binary, build_all
from grpo_devcluster.images import build_wheel
from grpo_devcluster.results import record

ROUNDS = 15
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "TERM": "dumb"}


def _commands() -> dict[str, list[str]]:
    build_all(("kubectl",))
    plugin = Path(sys.executable).with_name("kubectl-grpo")
    return {
        "cli_start_ms": [str(plugin), "status", "--help"],
        "kubectl_start_ms": [str(binary("kubectl")), "get", "--help"],
        "python_start_ms": [sys.executable, "-c", "pass"],
    }


def _milliseconds(command: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, env=_ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return 1000 * (time.monotonic() - began)


def main() -> None:
    """Measure and record."""
    commands = _commands()
    for command in commands.values():
        _milliseconds(command)  # reads the files into memory
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            found[name].append(_milliseconds(command))
    figures = {name: round(statistics.median(values)) for name, values in found.items()}
    figures["cli_start_ms_max"] = round(max(found["cli_start_ms"]))
    wheel = round(build_wheel().stat().st_size / 1e6, 2)
    record("experience", {**figures, "client_wheel_mb": wheel})


if __name__ == "__main__":
    main()
