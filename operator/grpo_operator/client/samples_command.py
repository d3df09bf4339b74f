"""Command that prints samples in the pod of a controller (pure)."""

_PROGRAM = ("python3", "-m", "grpo_worker.controller.show_samples")


def samples_command(
    *, step: int | None = None, prompt: int | None = None, limit: int | None = None, order: str = "",
    tokens: bool = False,
) -> list[str]:  # fmt: skip
    """Return the command; see the program's own options."""
    given = {"--step": step, "--prompt": prompt, "--order": order or None, "--limit": limit}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    return [*_PROGRAM, *options, *(["--tokens"] if tokens else [])]
