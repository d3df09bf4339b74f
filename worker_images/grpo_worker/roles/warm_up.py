"""Warm-up of a spare node: what a rank imports is then in the page cache of the node."""

import time

from grpo_worker.common.versions import Versions, installed


def import_trainer() -> tuple[float, Versions]:
    """Import what a rank imports, and end with it; return the seconds and the versions of the image.

    No process stays: the ranks on the other nodes start as new processes, too, and the slowest decides.
    """
    started = time.monotonic()
    import grpo_worker.roles.trainer
    from grpo_worker.megatron.cpu import platform as cpu_platform

    cpu_platform.install()
    import grpo_worker.roles.trainer_models  # noqa: F401

    return time.monotonic() - started, installed()
