"""Notes that ranks leave for each other in the process group's store.

Threads that write beside the steps read and leave them: a collective of theirs would meet those of the step.
"""

import time
from typing import Any

import torch.distributed as dist

from grpo_worker.common.polling import pause_after

_POLL_SECONDS = 0.01  # at first


def leave(key: str, text: str) -> None:
    """Leave a note. ``key``: unique in the life of the gang."""
    _store().set(key, text)


def read(key: str) -> str:
    """Return a note as soon as it is there. The wait has no limit: it ends with the gang."""
    store, began = _store(), time.monotonic()
    while not store.check([key]):  # a blocking read would lock the store for the other threads
        time.sleep(pause_after(time.monotonic() - began, _POLL_SECONDS))
    return str(store.get(key).decode())


def take(key: str) -> str:
    """Return a note as soon as it is there, and remove it: nobody else reads it."""
    text = read(key)
    _store().delete_key(key)
    return text


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
