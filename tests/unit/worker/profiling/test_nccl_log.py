"""The log of a real NCCL, which needs no GPU to write its first lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_worker.profiling.nccl_log import NcclLog
from grpo_worker.profiling.nccl_transport import Transport

# NCCL reads its environment once, so each case needs a process.
PROGRAM = """
import ctypes, os, sys, tempfile
from pathlib import Path
import torch  # loads NCCL
from grpo_worker.profiling.nccl_log import NcclLog

nccl, identifier = ctypes.CDLL("libnccl.so.2"), ctypes.create_string_buffer(128)
file = Path(tempfile.gettempdir()) / f"nccl-{os.getpid()}.log"
with NcclLog(sys.argv[1] == "wanted") as log:
    assert nccl.ncclGetUniqueId(identifier) == 0
    print(file.exists(), "NCCL INFO" in file.read_text() if file.exists() else "", str(log.transport()))
assert nccl.ncclGetUniqueId(identifier) == 0
print(file.exists(), [name for name in os.environ if name.startswith("NCCL_DEBUG")])
"""


def run(tmp_path: Path, wanted: str = "wanted", **environment: str) -> list[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_DEBUG")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, wanted],
        env=plain | {"TMPDIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_nccl_logs_until_the_end_and_leaves_no_file(tmp_path: Path) -> None:
    assert run(tmp_path) == ["True True not known", "False []"], "and writes nothing to stdout afterwards"
    assert list(tmp_path.iterdir()) == []


def test_ranks_without_gpus_have_no_log(tmp_path: Path) -> None:
    assert run(tmp_path, "unwanted") == ["False  not known", "False []"]


def test_a_log_that_the_user_asked_for_stays_theirs(tmp_path: Path) -> None:
    lines = run(tmp_path, NCCL_DEBUG="INFO")
    assert sum("NCCL INFO" in line for line in lines) > 0, "on stdout, as without us"
    assert [line for line in lines if "NCCL INFO" not in line and line] == [
        "False  not known",
        "False ['NCCL_DEBUG']",
    ]


def test_a_missing_file_means_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    with NcclLog() as log:
        assert log.transport() == Transport()
