"""Execution of untrusted programs. Reward functions of users may call it too."""

from grpo_worker.rewards.programs.client import ProgramServer

_servers: dict[bool, ProgramServer] = {}
_mode = {"required": True}


def use_sandbox(mode: str) -> None:
    """Set ``spec.reward.sandbox`` for this process: required or bestEffort."""
    _mode["required"] = mode == "required"


def start_sandbox() -> None:
    """Start what runs programs, before the first one. Raises SandboxError where it cannot confine them."""
    _server().start()


def run_python(program: str, tests: str, stdin: str, seconds: float) -> str | None:
    """Run the program in the sandbox, then the tests in its namespace; return their output.

    Returns None when they failed, or took, used or printed too much. Raises SandboxError, a ValueError.
    """
    return _server().run(program, tests, stdin, seconds)


def _server() -> ProgramServer:
    required = _mode["required"]
    return _servers.setdefault(required, ProgramServer(required))
