"""Dispatchers of tokens in a process of its own: what it can import decides them.

    python -m support.dispatcher_program CASE...

A case is a JSON object with arguments of ``resolved``. Prints the results as a JSON list, then what a model
with experts on two ranks is built of. torch's "fake" backend stands for the other rank.
"""

import json
import logging
import sys
from typing import Any

from grpo_worker.megatron.cpu import platform as cpu_platform

cpu_platform.install()

import torch  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from grpo_operator.api.v1alpha1.layout import Layout  # noqa: E402
from grpo_operator.api.v1alpha1.moe import TokenDispatcher  # noqa: E402
from grpo_operator.api.v1alpha1.trainer import KernelChoice  # noqa: E402
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel  # noqa: E402
from grpo_worker.megatron.model.token_dispatcher import (  # noqa: E402
    DEEPEP,
    DispatcherChoice,
    dispatcher_fields,
)
from support.ranks.planner_cases import fake_groups  # noqa: E402
from support.tiny_models import tiny_model  # noqa: E402

_TEXTS: list[str] = []


class _Texts(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _TEXTS.append(record.getMessage())


def resolved(
    asked: str = "auto",
    kernels: str = "transformer-engine",
    gpus: int = 8,
    passed: dict[str, Any] | None = None,
    **sizes: int,
) -> dict[str, Any]:
    """Return the fields, or the error, and what was logged."""
    layout = Layout(**({"world": 64, "expert": 8} | sizes))
    _TEXTS.clear()
    try:
        choice = DispatcherChoice(TokenDispatcher(asked), gpus)
        found: Any = dispatcher_fields(choice, KernelChoice(kernels), layout, passed or {})
    except ValueError as error:
        found = str(error)
    return {"found": found, "logged": list(_TEXTS)}


def built(fields: dict[str, Any]) -> list[str]:
    """Return the classes of the dispatcher in an expert layer, and of what moves its tokens."""
    layout = Layout(world=2, expert=2)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with fake_groups():
        initialize_parallel(layout, 0)
    (chunk,) = build_chunks(tiny_model("deepseek_v3"), layout, **fields)
    dispatcher = chunk.decoder.layers[-1].mlp.token_dispatcher
    mover = getattr(dispatcher, "_comm_manager", None)
    return [type(dispatcher).__name__, type(mover).__name__, str(chunk.config.moe_router_dtype)]


if __name__ == "__main__":
    logger = logging.getLogger("grpo_worker.megatron.model.token_dispatcher")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Texts())
    results = [resolved(**json.loads(case)) for case in sys.argv[1:]]
    try:
        model = built(DEEPEP)
    except (ImportError, TypeError) as error:
        model = [str(error)]
    print(json.dumps([results, model]))
