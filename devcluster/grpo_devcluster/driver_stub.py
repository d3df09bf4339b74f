"""Stub of NVIDIA's driver library: SGLang's CPU build links against it without using it."""

from pathlib import Path

from grpo_devcluster.stages import run

# The only symbol that is needed; it returns the error of a missing device.
SOURCE = "int cuPointerGetAttribute(void *d, int a, unsigned long long p) { return 100; }\n"


def build(target: Path) -> None:
    """Compile the stub to ``target``. Raises StageError without a C compiler."""
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", target, "-"]
    run(command, step="compiling the driver stub", remedy="Install gcc.", stdin=SOURCE)
