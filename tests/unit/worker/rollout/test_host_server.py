"""A host of a multi-host engine runs its server in the rounds that the agent names, with real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from grpo_worker.rollout.sglang.host_server import HostServer

# Writes its process id, that of its child and its arguments, then waits for a file that tells it to fail.
SERVER = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
(folder / "new").write_text(f"{os.getpid()} {child.pid} {' '.join(sys.argv[2:])}")
(folder / "new").rename(folder / f"started-{len(list(folder.glob('started-*')))}")
while not (folder / "fail").exists():
    time.sleep(0.05)
(folder / "fail").unlink()
sys.exit("RuntimeError: Connection closed by peer")
"""


class AgentStub:
    """Answers each report with the round that the test has set; None: it does not answer."""

    def __init__(self) -> None:
        self.round: str | None = ""
        self.reports: list[dict[str, str]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.reports.append(dict(parse_qsl(urlsplit(self.path).query)))
                self.send_response(200 if stub.round is not None else 503)
                self.end_headers()
                self.wfile.write(json.dumps({"round": stub.round, "rendezvous": "10.0.0.1:20000"}).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hostz"


@pytest.fixture
def agent() -> Iterator[AgentStub]:
    stub = AgentStub()
    yield stub
    stub.server.shutdown()


@pytest.fixture
def host(agent: AgentStub, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    module = "grpo_worker.rollout.sglang.engine_process"
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", module, "--rounds", agent.url, *command])
    yield process
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def until(check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 90
    while not (value := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def started(folder: Path, number: int) -> list[str]:
    file = folder / f"started-{number}"
    until(file.exists)
    return file.read_text().split()


def ended(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_servers_run_in_rounds_and_end_with_all_their_processes(
    agent: AgentStub, host: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    until(lambda: len(agent.reports) >= 2)
    assert agent.reports[-1]["process"] and "round" not in agent.reports[-1], "no round, no server"
    agent.round = "first"
    server, child, *arguments = started(tmp_path, 0)
    assert arguments == ["--dist-init-addr", "10.0.0.1:20000"]
    until(lambda: agent.reports[-1].get("round") == "first")
    agent.round = None  # the agent restarts
    time.sleep(2.5)
    assert not ended(server)
    agent.round = ""
    until(lambda: ended(server) and ended(child))
    until(lambda: "round" not in agent.reports[-1])
    assert "error" not in agent.reports[-1], "it was killed, it did not fail"
    agent.round = "second"
    assert started(tmp_path, 1)[0] != server
    assert len({report["process"] for report in agent.reports}) == 1


def test_a_server_that_fails_reports_its_error_and_waits_for_the_next_round(
    agent: AgentStub, host: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    agent.round = "first"
    server, child, *_ = started(tmp_path, 0)
    (tmp_path / "fail").touch()
    failed = until(lambda: next((r for r in agent.reports if "error" in r), None))
    assert (failed["ended"], failed["error"]) == ("first", "RuntimeError: Connection closed by peer")
    assert "round" not in failed and host.poll() is None, "kubelet need not restart the container"
    until(lambda: ended(server) and ended(child))


def test_a_signal_ends_the_server_and_the_container(
    agent: AgentStub, tmp_path: Path, host: "subprocess.Popen[bytes]"
) -> None:
    agent.round = "first"
    server = started(tmp_path, 0)[0]
    os.kill(host.pid, signal.SIGTERM)
    assert host.wait(60) == 0
    assert ended(server)


def test_a_signal_while_the_server_starts_ends_it() -> None:
    servers: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str]) -> "tuple[subprocess.Popen[bytes], Callable[[], str]]":
        servers.append(subprocess.Popen(command, start_new_session=True))
        starting.stop(signal.SIGTERM)  # as the handler of a signal that comes now
        return servers[-1], str

    # A round is run without an agent; the rendezvous is an argument that the command ignores.
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    starting = HostServer(command, "http://127.0.0.1:9", start, lambda _: servers[-1].wait(60))
    starting._run_round("1", "127.0.0.1:1")
    assert servers[0].returncode == -signal.SIGTERM
