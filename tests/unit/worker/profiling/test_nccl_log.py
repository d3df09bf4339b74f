"""The log of a real NCCL, which needs no GPU to write its first lines."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from grpo_worker.profiling.nccl_log import NcclLog
from grpo_worker.profiling.nccl_transport import Transport

# NCCL reads its environment once, so each case needs a process. A thread of NCCL writes to stdout at any
# time, so what the program finds goes to stderr.
PROGRAM = """
import ctypes, os, sys, tempfile
from pathlib import Path
import torch  # loads NCCL
from grpo_worker.profiling.nccl_log import NcclLog

nccl, identifier = ctypes.CDLL("libnccl.so.2"), ctypes.create_string_buffer(128)
file = Path(tempfile.gettempdir()) / f"nccl-{os.getpid()}.log"
with NcclLog(sys.argv[1] == "wanted") as log:
    assert nccl.ncclGetUniqueId(identifier) == 0
    written = file.exists() and "NCCL INFO" in file.read_text()
    print("written:", written, "transport:", log.transport(), file=sys.stderr)
assert nccl.ncclGetUniqueId(identifier) == 0
left = [name for name in os.environ if name.startswith("NCCL_DEBUG")]
print("file:", file.exists(), "environment:", left, file=sys.stderr)
"""


def run(tmp_path: Path, wanted: str = "wanted", **environment: str) -> tuple[list[str], str]:
    """Return what the program found, and what NCCL wrote to stdout."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_DEBUG")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, wanted],
        env=plain | {"TMPDIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stderr.splitlines(), done.stdout


def test_nccl_logs_until_the_end_and_leaves_no_file(tmp_path: Path) -> None:
    found, stdout = run(tmp_path)
    assert found == ["written: True transport: not known", "file: False environment: []"]
    assert stdout == "" and list(tmp_path.iterdir()) == []


def test_ranks_without_gpus_have_no_log(tmp_path: Path) -> None:
    found, stdout = run(tmp_path, "unwanted")
    assert found == ["written: False transport: not known", "file: False environment: []"] and stdout == ""


def test_a_log_that_the_user_asked_for_stays_theirs(tmp_path: Path) -> None:
    found, stdout = run(tmp_path, NCCL_DEBUG="INFO")
    assert found == ["written: False transport: not known", "file: False environment: ['NCCL_DEBUG']"]
    assert "NCCL INFO" in stdout, "as without us"


def test_warnings_before_a_failure_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    warning = "node-01:1:1 [3] plugin/net.cc:334 NCCL WARN Failed to initialize any NET plugin"

    def start() -> None:
        with NcclLog():
            Path(os.environ["NCCL_DEBUG_FILE"]).write_text(f"node-01:1:1 [3] NCCL INFO x\n{warning}\n")
            raise RuntimeError("unhandled system error")

    with pytest.raises(RuntimeError, match="unhandled"):
        start()
    assert caplog.messages == [warning] and list(tmp_path.iterdir()) == []


def test_a_missing_file_means_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    with NcclLog() as log:
        assert log.transport() == Transport()
