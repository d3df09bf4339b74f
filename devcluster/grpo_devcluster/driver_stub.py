"""A library that stands for NVIDIA's driver: SGLang's CPU build links against it without using it."""

from pathlib import Path

from grpo_devcluster.stages import run

# The only symbol that is wanted, failing as a missing device would.
SOURCE = "int cuPointerGetAttribute(void *d, int a, unsigned long long p) { return 100; }\n"


def build(target: Path) -> None:
    """Compile it. Raises StageError without a C compiler."""
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", target, "-"]
    run(command, step="compiling the driver stub", remedy="Install gcc.", stdin=SOURCE)
