"""The user's cluster, reached through the user's own kubectl: its contexts, credentials and plugins apply."""

import json
import subprocess
from dataclasses import dataclass
from typing import Any, NoReturn


class KubectlError(Exception):
    """kubectl has failed. The text is what it printed."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """kubectl with the options that every call gets, such as ``--namespace``. ``program``: its path."""

    options: tuple[str, ...] = ()
    program: str = "kubectl"

    def text(self, *arguments: str, stdin: str | None = None) -> str:
        """Return what kubectl prints. Raises KubectlError."""
        try:
            done = subprocess.run(
                self._command(arguments), input=stdin, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise KubectlError(f"{self.program} is not on the PATH: install kubectl") from None
        if done.returncode:
            raise KubectlError(done.stderr.strip() or f"kubectl {arguments[0]} failed")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return an object, or the list of objects. Raises KubectlError."""
        return dict(json.loads(self.text("get", *arguments, "-o", "json")))

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects of a list. Raises KubectlError."""
        return list(self.get(*arguments)["items"])

    def job(self, name: str) -> dict[str, Any]:
        """Return a GRPOJob. Raises KubectlError."""
        return self.get("grpojobs.rl.grpo.dev", name)

    def patch(self, name: str, change: dict[str, Any], *options: str) -> str:
        """Change a GRPOJob by a merge patch and return what kubectl prints. Raises KubectlError."""
        kind = "grpojobs.rl.grpo.dev"
        return self.text("patch", kind, name, "--type=merge", "-p", json.dumps(change), *options)

    def follow(self, *arguments: str) -> NoReturn:
        """Let kubectl print until it ends, and end with its exit code."""
        raise SystemExit(subprocess.run(self._command(arguments), check=False).returncode)

    def opened(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start kubectl with pipes to its input and output. Raises KubectlError."""
        try:
            pipe = subprocess.PIPE
            return subprocess.Popen(self._command(arguments), stdin=pipe, stdout=pipe, text=True)
        except FileNotFoundError:
            raise KubectlError(f"{self.program} is not on the PATH: install kubectl") from None

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        return [self.program, *self.options, *arguments]
