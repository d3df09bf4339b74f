"""A reward server in a thread, whose answers a test gives."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Judge(BaseHTTPRequestHandler):
    """Handler of requests. ``answers``: status and body of the next ones. ``requests``: bodies so far."""

    answers: list[tuple[int, Any]]
    requests: list[dict[str, Any]]
    answer: Callable[[dict[str, Any]], tuple[int, Any]] | None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        give = type(self).answer
        code, answer = give(body) if give else self.answers.pop(0)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def reward_server(
    answer: Callable[[dict[str, Any]], tuple[int, Any]] | None = None,
) -> Iterator[tuple[str, type[Judge]]]:
    """Run a server; give its URL and its handler. ``answer``: to a request, instead of ``answers``."""
    handler = type("Handler", (Judge,), {"answers": [], "requests": [], "answer": answer})
    with HTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/judge", handler
        running.shutdown()
