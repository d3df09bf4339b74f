"""Stand-in for the services of Google that issue access tokens."""

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt

_ACCOUNT = "jobs@tests.iam.gserviceaccount.com"
_INSTANCE = "/computeMetadata/v1/instance/service-accounts"
_AUDIENCE = "https://oauth2.googleapis.com/token"  # that clients sign, whatever the endpoint
_SECONDS = 3600  # that a token is good for


def _private_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class StandInGoogle:
    """Answers for the token endpoint, which wants a signature, and for the metadata server of GKE.

    ``issued``: the tokens, by who asked for them: "key" or "metadata". ``failing``: status of all answers.
    """

    def __init__(self) -> None:
        self._private = _private_key()
        self.issued: dict[str, str] = {}
        self.failing: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def metadata(self) -> dict[str, str]:
        """Environment of a process for which this is the metadata server."""
        return {"GCE_METADATA_HOST": self.address, "GCE_METADATA_IP": self.address}

    def key(self, foreign: bool = False) -> str:
        """Return the JSON key of a service account. ``foreign``: whose private key is not the account's."""
        pem = (_private_key() if foreign else self._private).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return json.dumps(
            {
                "type": "service_account",
                "client_email": _ACCOUNT,
                "private_key_id": "1",
                "private_key": pem.decode(),
                "token_uri": f"http://{self.address}/token",
            }
        )

    def accepts(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has a token of this server."""
        return headers.get("Authorization", "").removeprefix("Bearer ") in self.issued

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _issue(self, origin: str) -> dict[str, Any]:
        token = f"{origin}-{len(self.issued)}-{time.monotonic_ns()}"
        self.issued[token] = origin
        return {"access_token": token, "expires_in": _SECONDS, "token_type": "Bearer"}

    def grant(self, body: bytes) -> tuple[int, Any]:
        """Answer a request to the token endpoint."""
        (assertion,) = parse_qs(body.decode())["assertion"]
        public = self._private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        try:
            jwt.decode(assertion, certs=public, audience=_AUDIENCE)
        except ValueError as error:
            return 400, {"error": "invalid_grant", "error_description": str(error)}
        return 200, self._issue("key")

    def describe(self, path: str) -> tuple[int, Any]:
        """Answer a request to the metadata server."""
        if path == "/":
            return 200, ""
        if path == f"{_INSTANCE}/default/token":
            return 200, self._issue("metadata")
        if path == f"{_INSTANCE}/default/":
            return 200, {"email": _ACCOUNT, "scopes": [], "aliases": ["default"]}
        return 404, ""


def _handler(google: StandInGoogle) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*google.describe(urlsplit(self.path).path))

        def do_POST(self) -> None:
            self._answer(*google.grant(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(google.failing or status)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    return Handler
