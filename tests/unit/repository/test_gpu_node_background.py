"""Work in the background of a machine whose calls end: started in a copy, followed, copied, and ended."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from grpo_devcluster.gpu_node import faults
from grpo_devcluster.gpu_node.background import Work
from grpo_devcluster.paths import REPO
from grpo_devcluster.stages import StageError

# Writes a result, then waits for a file, prints the folder that it runs in, and ends with code 5.
PROGRAM = """
import os, pathlib, sys, time
results, gate = map(pathlib.Path, sys.argv[1:])
(results / "calm.json").write_text("{}")
print("begun", os.environ["GRPO_COMMIT"], os.environ["PYTHONPATH"].split(":")[0])
while not gate.exists():
    time.sleep(0.02)
print("in", pathlib.Path.cwd())
sys.exit(5)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with what the work needs of it, and a folder that is not copied."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "devcluster").symlink_to(REPO / "devcluster")
    (tmp_path / "checkout" / "build").mkdir()
    (tmp_path / "checkout" / "program.py").write_text(PROGRAM)
    return tmp_path / "checkout"


def _start(work: Work, checkout: Path, gate: Path) -> None:
    line: list[str | Path] = [sys.executable, "program.py", work.results, gate]
    work.start(checkout, line, {"GRPO_COMMIT": "abc"})


def _ended(work: Work) -> bool:
    deadline = time.monotonic() + 30
    while work.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not work.running()


def test_work_runs_in_a_copy_and_is_followed_until_it_ends(
    tmp_path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, gate, out = Work(tmp_path / "work"), tmp_path / "gate", tmp_path / "out"
    assert not work.started() and not work.running()
    _start(work, checkout, gate)
    (checkout / "program.py").unlink()  # as the next transfer does
    assert not (work.source / "build").exists()
    assert work.running() and work.started()
    with pytest.raises(StageError, match="still runs: follow it"):
        _start(work, checkout, gate)
    while "begun" not in work.log.read_text():
        time.sleep(0.05)
    assert not faults.follow(work, out, 0)
    printed = capsys.readouterr().out
    assert f"begun abc {work.source}/operator" in printed and "The work still runs" in printed
    assert json.loads((out / "calm.json").read_text()) == {}
    gate.touch()
    assert faults.follow(work, out, 30) and work.exit_code() == 5
    printed = capsys.readouterr().out
    assert f"in {work.source}\n" in printed and "The work ended with exit code 5" in printed
    assert (out / "log.txt").read_text() == work.log.read_text()


def test_work_that_is_killed_has_ended_without_an_exit_code(tmp_path: Path, checkout: Path) -> None:
    work = Work(tmp_path / "work")
    _start(work, checkout, tmp_path / "gate")
    pid = int((work.folder / "process").read_text().split()[0])
    assert os.getsid(pid) == pid  # what ends the call's processes does not reach it
    os.killpg(pid, signal.SIGKILL)
    assert _ended(work) and work.exit_code() is None
    assert faults._state(work, False, tmp_path).startswith("The work was killed")


def test_the_command_names_the_copys_manifest_and_the_faults(tmp_path: Path) -> None:
    work = Work(tmp_path)
    manifest = "manifests/gpu/deepseek-v3-1b-1gpu.yaml"
    args = faults.arguments(["/tmp/x", "start", "out", str(REPO / manifest), "40", "rank", "operator"])
    line = [str(part) for part in faults.command(work, args)][1:]
    assert line == [
        *("benchmarks/gpu/faults.py", str(work.results), str(work.source / manifest), "calm", "faulted"),
        *("--steps", "40", "--only", "rank", "operator"),
    ]
    args = faults.arguments(["/tmp/x", "start", "out", str(REPO / manifest), "40"])
    assert "--only" not in faults.command(work, args)
    args = faults.arguments(["/tmp/x", "start", "out", "none.yaml", "40"])
    with pytest.raises(StageError, match=r"none\.yaml is not a file"):
        faults.command(work, args)


def test_only_what_is_new_in_a_log_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    read = faults._print_new(log, 0)
    log.write_text("one\ntwo\n")
    assert faults._print_new(log, read) == 8
    assert capsys.readouterr().out == "one\ntwo\n"


def test_the_scripts_usage_is_its_whole_head() -> None:
    lines = (REPO / "devcluster" / "gpu-node.sh").read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert f"sed -n '2,{head}s/^# //p'" in "\n".join(lines)
    actions = [line.strip().split(")")[0] for line in lines if line.startswith("    ") and ";;" in line]
    usage = "\n".join(lines[:head])
    assert all(action in usage for action in actions[:-1]) and len(actions) > 5
