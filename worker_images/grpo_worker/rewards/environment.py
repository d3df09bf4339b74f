"""Environment of the processes that judge answers."""

import os

_NAMES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR")


def reward_environment() -> dict[str, str]:
    """Return the variables that are passed on: a reward function must not see the pod's secrets."""
    return {name: os.environ[name] for name in _NAMES if name in os.environ}
