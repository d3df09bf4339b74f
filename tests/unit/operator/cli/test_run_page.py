"""The relay of the page to a browser."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError
from grpo_operator.cli.kubectl.run_page import Answer, LocalServer, Relay, page_of

_ECHO = """
import json, sys
for line in sys.stdin:
    if "end" in line: break
    body = sys.argv[1] + line.strip()
    print(json.dumps({"status": 200, "type": "text/plain", "body": body}), flush=True)
"""


class _Programs:
    """Starts programs that answer with their number, or refuses to."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []
        self.refusal = ""

    def start(self) -> "subprocess.Popen[str]":
        if self.refusal:
            raise KubectlError(self.refusal)
        pipe, number = subprocess.PIPE, str(len(self.started))
        command = [sys.executable, "-c", _ECHO, number]
        self.started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return self.started[-1]


def test_a_relay_starts_its_program_again_when_that_has_ended() -> None:
    programs = _Programs()
    relay = Relay(programs.start)
    assert relay.get("page").body == "0/page" and relay.get("v1/page/data").body == "0/v1/page/data"
    programs.started[0].kill()
    programs.started[0].wait()
    assert relay.get("page").body == "1/page"
    assert relay.get("end").status == 502, "which every program ends at"
    programs.refusal = "tiny has no running controller"
    assert json.loads(relay.get("page").body) == {"error": programs.refusal}
    relay.close()
    assert all(program.poll() is not None for program in programs.started)


@pytest.fixture
def server() -> LocalServer:
    made = LocalServer(lambda path: Answer(200, "text/plain", path), 0)
    threading.Thread(target=made.run, daemon=True).start()
    return made


def test_a_local_server_relays_the_page_and_nothing_else(server: LocalServer) -> None:
    base = server.url.removesuffix("page")
    assert httpx.get(server.url).text == "page"
    assert httpx.get(f"{base}v1/page/steps?after=3&time=1.5").text == "v1/page/steps?after=3&time=1.5"
    for refused in (f"{base}v1/status", f"{base}metrics", httpx.URL(server.url).join("/page"), base):
        assert httpx.get(refused).status_code == 404
    assert httpx.get(server.url, headers={"host": "evil.example:80"}).status_code == 404
    assert httpx.post(server.url).status_code == 501
    server.stop()


def test_a_job_without_a_controller_names_the_file_of_its_page(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    job = {"metadata": {"name": "tiny", "namespace": "rl", "uid": "0123456789"}}
    kubectl.write_text(
        f"#!/bin/sh\ncase $2 in pods) echo '{{\"items\": []}}';; *) echo '{json.dumps(job)}';; esac\n"
    )
    kubectl.chmod(0o755)
    with pytest.raises(KubectlError, match=r"tiny has no running controller: .*run\.html.* are in /"):
        page_of(Cluster(program=str(kubectl)), "tiny")
