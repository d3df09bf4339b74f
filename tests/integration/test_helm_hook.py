"""The program of ``helm test``: it finds errors that go on, and none that have passed."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml

from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import CHART

_METRICS = "http://ops-metrics.grpo-system:9090"
_PAUSE = "time.sleep(10)"
_SERVES = "grpo_api_requests_total 5.0\n"
_OK = 'grpo_reconciles_total{kind="GRPOJob",result="success"} 7.0\n'
_ERROR = 'grpo_reconciles_total{kind="GRPOJob",result="error"} '
_OTHER = 'grpo_reconciles_total{kind="RolloutPool",result="error"} '


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """These tests need none."""


@pytest.fixture(scope="module")
def program() -> str:
    """Return the program of the chart's test, which waits between its two looks."""
    command = [str(binary("helm")), "template", "ops", str(CHART), "-n", "grpo-system"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    objects = [found for found in yaml.safe_load_all(done.stdout) if found]
    (pod,) = [found for found in objects if found["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    (text,) = container["args"]
    assert _METRICS in text and _PAUSE in text
    return str(text)


@contextmanager
def _serving(pages: list[str]) -> Iterator[str]:
    """Serve one page after the other, and yield the URL."""
    left = iter(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(left).encode())

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _passes(program: str, first: str, second: str) -> bool:
    with _serving([first, second]) as url:
        text = program.replace(_METRICS, url).replace(_PAUSE, "time.sleep(0)")
        return subprocess.run([sys.executable, "-c", text], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_SERVES + _OK, _SERVES + _OK),
        (_SERVES + _ERROR + "3.0\n" + _OK, _SERVES + _ERROR + "3.0\n" + _OK),
    ],
    ids=["no error", "an error that has passed"],
)
def test_a_release_without_new_errors_passes(program: str, first: str, second: str) -> None:
    assert _passes(program, first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_SERVES + _ERROR + "3.0\n", _SERVES + _ERROR + "4.0\n"),
        (_SERVES + _ERROR + "3.0\n", _SERVES + _ERROR + "3.0\n" + _OTHER + "1.0\n"),
        (_SERVES, _SERVES + _ERROR + "1.0\n"),
        ("another_programs_metric 1.0\n", "another_programs_metric 1.0\n"),
    ],
    ids=["an error that grows", "an error of another kind", "a first error", "no operator"],
)
def test_a_release_with_new_errors_fails(program: str, first: str, second: str) -> None:
    assert not _passes(program, first, second)
