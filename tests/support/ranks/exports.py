"""Exports that ranks wait for."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from grpo_worker.megatron.export.exporter import begin_export
from grpo_worker.profiling.background import join

_begin: Callable[..., "Future[None]"] = partial(begin_export, beside=False)


def export(*arguments: Any, **more: Any) -> None:
    """Write a Hugging Face directory, and wait for it; see ``begin_export``. Collective."""
    join(_begin(*arguments, **more))
