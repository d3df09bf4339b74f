"""The page of a run: into a file, or in a browser, over ``kubectl exec`` in the controller's pod.

Nobody needs the key of the job's pods for that, only the right to execute programs in them.
"""

import json
import secrets
import subprocess
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError
from grpo_operator.cli.kubectl.job_files import JobFiles

WANTED = "curves and samples (run.html)"
# In the pod: prints the page with its data; reads paths, a line each, and prints the controller's answers.
PAGE = ("python3", "-m", "grpo_worker.controller.show_page")
RELAY = ("python3", "-m", "grpo_worker.controller.relay_page")
_RELAYED = ("page", "v1/page/")
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "frame-ancestors 'none'",  # the page has its own besides
}


def page_of(cluster: Cluster, job: str) -> str:
    """Return the page of a job, which asks nobody. Raises KubectlError."""
    files = JobFiles.of(cluster, job, WANTED)
    return cluster.text("exec", files.pod, "-c", "controller", "--", *PAGE)


def serve(cluster: Cluster, job: str, port: int, browser: bool) -> None:
    """Serve the page of a job until Ctrl-C. ``browser``: open it there. Raises KubectlError."""
    relay = Relay.of(cluster, job)
    relay.start()
    server = LocalServer(relay.get, port)
    print(f"{server.url}\nEnd with Ctrl-C.", flush=True)
    if browser:
        webbrowser.open(server.url)
    try:
        server.run()
    finally:
        relay.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a controller. ``kind``: its Content-Type."""

    status: int
    kind: str
    body: str

    @classmethod
    def problem(cls, why: str) -> Self:
        """Return the answer in place of a controller that cannot be reached."""
        return cls(HTTPStatus.BAD_GATEWAY, "application/json", json.dumps({"error": why}))


class Relay:
    """Requests to a job's controller over a program in its pod, which is started again when it has ended.

    ``start``: starts the program, with pipes. Raises KubectlError.
    """

    def __init__(self, start: Callable[[], "subprocess.Popen[str]"]) -> None:
        self._start, self._lock = start, threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def of(cls, cluster: Cluster, job: str) -> Self:
        """Return the relay to the controller that the job has when the program starts."""

        def start() -> "subprocess.Popen[str]":
            pod = JobFiles.of(cluster, job, WANTED).pod
            return cluster.opened("exec", "-i", pod, "-c", "controller", "--", *RELAY)

        return cls(start)

    def start(self) -> None:
        """Start the program now. Raises KubectlError."""
        with self._lock:
            self._process = self._process or self._start()

    def get(self, path: str) -> Answer:
        """Return the controller's answer to ``GET /path``, one request at a time."""
        with self._lock:
            for _ in range(2):  # the controller may have been replaced since the last request
                try:
                    line = self._line(path)
                except KubectlError as error:
                    return Answer.problem(str(error))
                if line:
                    found = json.loads(line)
                    return Answer(found["status"], found["type"], found["body"])
                self._end()
        return Answer.problem("kubectl exec in the controller's pod has ended")

    def close(self) -> None:
        """End the program."""
        with self._lock:
            self._end()

    def _line(self, path: str) -> str:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(f"/{path}\n")
            process.stdin.flush()
            return process.stdout.readline()
        return ""

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class LocalServer:
    """Server of the page at 127.0.0.1, below a path that only this user knows. ``port``: 0: any."""

    def __init__(self, get: Callable[[str], Answer], port: int) -> None:
        base = f"/{secrets.token_urlsafe(24)}/"
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(get, base))
        self.url = f"http://127.0.0.1:{self._server.server_port}{base}page"

    def run(self) -> None:
        """Serve until ``stop``, or Ctrl-C."""
        with suppress(KeyboardInterrupt):
            self._server.serve_forever()

    def stop(self) -> None:
        """Let ``run`` return and give the port back."""
        self._server.shutdown()
        self._server.server_close()


def _handler(get: Callable[[str], Answer], base: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known, host = self.path.startswith(base), self.headers.get("host", "").rpartition(":")[0]
            path = self.path.removeprefix(base)
            # Another host name is a web site that has its name point to this machine.
            if not known or host != "127.0.0.1" or not path.startswith(_RELAYED):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            answer = get(path)
            body = answer.body.encode()
            self.send_response(answer.status)
            for name, value in {**_HEADERS, "content-type": answer.kind}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # the browser asks no longer
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:  # paths have the secret
            pass

    return Handler
