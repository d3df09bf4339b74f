"""Layout server: hands the layouts of the trainer ranks to the agents of a transfer group's engines.

An agent imports no torch, so it cannot read them from the group's store. Only a client that knows the group's
random name gets an answer.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LayoutServer:
    """Serves ``layouts`` at ``/NAME`` of a free ``port`` until it is closed."""

    def __init__(self, name: str, layouts: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # http.server chooses the method by this name
                known = self.path == f"/{name}"
                self.send_response(200 if known else 404)
                self.send_header("content-length", str(len(layouts) if known else 0))
                self.end_headers()
                if known:
                    self.wfile.write(layouts)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True, name="layouts").start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
