"""The real command line as a process: exit code and report."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "grpo_operator.cli.plan", "--rehearse", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def test_the_command_reports_a_restore_from_the_store(small_manifest: Path, tmp_path: Path) -> None:
    faults = ("--steps", "3", "--checkpoint-every", "1", "--lose-node", "0:20")
    store = "--store-gigabytes-per-second", "50"
    done = run(str(small_manifest), "--name", "restore", *faults, *store, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "small-restore.json").read_text())
    assert figures["phase"] == "Succeeded" and len(figures["steps"]) == 3
    assert figures["scenario"]["dead_nodes"] == [[0, 20.0]]
    assert "training pod 0 is lost" in done.stdout and "the step waits" in done.stdout
    assert len(figures["checkpoints"]["loads"]) == 1 and "TB read in" in done.stdout
    assert (tmp_path / "small-restore.svg").is_file()


def test_the_command_fails_with_the_job(small_manifest: Path) -> None:
    small_manifest.write_text(small_manifest.read_text() + "  restartPolicy: {hangSeconds: 60}\n")
    done = run(str(small_manifest), "--json", "--store-gigabytes-per-second", "0.05")
    assert done.returncode == 1, done.stderr
    figures = json.loads(done.stdout)
    assert figures["phase"] == "Failed" and "no progress" in figures["message"]
