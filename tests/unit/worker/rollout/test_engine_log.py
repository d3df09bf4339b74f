"""Lines of an engine's server on their way to the job's store: out of its container, through its agent."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from grpo_operator.api.names import ENGINE_LOG_VARIABLE
from grpo_worker.common.log_lines import LabelledLines, LogLabels
from grpo_worker.common.shared_lines import LinesReader, LinesWriter
from grpo_worker.weightsync.agent.engine_log import EngineLog
from support.faults import until

LINE = b"%04d of the server\n"


def test_a_reader_gets_each_line_once_also_of_files_that_were_replaced(tmp_path: Path) -> None:
    file = tmp_path / "engine.log"
    reader, writer = LinesReader(file), LinesWriter(file, 10 * len(LINE % 0))
    assert reader.read() == []
    found = []
    for number in range(35):
        writer.write(LINE % number)
        if number % 8 == 0:  # the file holds ten lines
            found += reader.read()
    found += reader.read()
    assert found == [(LINE % number).decode().rstrip() for number in range(35)]
    assert reader.read() == []
    assert file.stat().st_size <= 10 * len(LINE % 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log", "engine.log.1"]


def test_a_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "engine.log"
    reader = LinesReader(file)
    file.write_bytes(b"first\nthe se")
    assert reader.read() == ["first"]
    with file.open("ab") as handle:
        handle.write(b"cond\n")
    assert reader.read() == ["the second"]


def test_a_disk_that_takes_nothing_does_not_stop_the_writer(tmp_path: Path) -> None:
    LinesWriter(tmp_path / "no-such-folder" / "engine.log").write(b"lost\n")
    assert list(tmp_path.iterdir()) == []


def _serve(file: Path, *lines: str) -> None:
    """Run a server that fails with these lines as the first process of an engine's container does."""
    script = f"import sys; print(*{lines!r}, sep='\\n', file=sys.stderr); sys.exit(3)"
    module = "grpo_worker.rollout.sglang.engine_process"
    environment = os.environ | {ENGINE_LOG_VARIABLE: str(file)}
    command = [sys.executable, "-m", module, sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.splitlines() == list(lines), done.stderr


def test_lines_of_a_server_that_died_keep_its_role_and_the_agents_labels(tmp_path: Path) -> None:
    file = tmp_path / "engine.log"
    _serve(file, "100% loaded", "ValueError: no")
    kept: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(LabelledLines(LogLabels("engine-agent", engine="pod", version=3)).format(record))

    EngineLog(file, Kept()).start(pause=0.01)
    until("both lines", lambda: len(kept) == 2, 20)
    assert [line.partition(" INFO ")[2] for line in kept] == [
        "engine engine=pod version=3: 100% loaded", "engine engine=pod version=3: ValueError: no",
    ]  # fmt: skip


def test_an_agent_that_ends_leaves_its_lines_and_those_of_its_engine(tmp_path: Path) -> None:
    file = tmp_path / "engine.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable, "-m", "grpo_worker.weightsync.main", "rollout", "--host", "127.0.0.1", "--port", port,
        "--name", "tiny-moe-a", "--engine", "http://127.0.0.1:9", "--logs", str(tmp_path / "logs"),
        "--engine-log", str(file),
    ]  # fmt: skip
    _serve(file, "ValueError: no")
    agent = subprocess.Popen(command)
    try:
        until("the agent", lambda: httpx.get(f"http://127.0.0.1:{port}/healthz").is_success, 240)
        logs = tmp_path / "logs"
        (stored,) = until("its file", lambda: list(logs.glob("engine.*.tiny-moe-a.log")), 20)
        _serve(file, "ValueError: later")
    finally:
        agent.send_signal(signal.SIGTERM)
        code = agent.wait(120)
    text = stored.read_text()
    assert code == 0
    for line in ("ValueError: no", "ValueError: later"):
        assert len(re.findall(rf" INFO engine engine=tiny-moe-a: {line}\n", text)) == 1, text
    assert re.search(r" \w+ engine-agent engine=tiny-moe-a: ", text), text
