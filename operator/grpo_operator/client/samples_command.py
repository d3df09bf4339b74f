"""Command that prints samples in the pod of a controller (pure)."""

from typing import TypedDict

_PROGRAM = ("python3", "-m", "grpo_worker.controller.show_samples")


class SampleOptions(TypedDict, total=False):
    """Options that select samples; see ``GRPOClient.samples``."""

    step: int | None
    prompt: int | None
    limit: int | None
    tokens: bool
    validation: bool
    of: str | None


def samples_command(
    *, step: int | None = None, prompt: int | None = None, limit: int | None = None, order: str = "",
    tokens: bool = False, validation: bool = False, of: str | None = None,
) -> list[str]:  # fmt: skip
    """Return the command; see the program's own options. ``of``: its ``--set``."""
    given = {"--step": step, "--set": of, "--prompt": prompt, "--order": order or None, "--limit": limit}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    flags = {"--tokens": tokens, "--validation": validation}
    return [*_PROGRAM, *options, *(flag for flag, wanted in flags.items() if wanted)]
