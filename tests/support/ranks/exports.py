"""Exports that ranks wait for, and the models of transformers that load them."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from grpo_worker.megatron.export.exporter import begin_export
from grpo_worker.profiling.background import join

_begin: Callable[..., "Future[None]"] = partial(begin_export, beside=False)


def export(*arguments: Any, **more: Any) -> None:
    """Write a Hugging Face directory, and wait for it; see ``begin_export``. Collective."""
    join(_begin(*arguments, **more))


def reference(folder: str | Path) -> Any:
    """Load a Hugging Face directory with transformers, in fp32.

    transformers does not know Kimi-K2, whose layers are DeepSeek-V3's.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["model_type"] != "kimi_k2":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known = DeepseekV3Config(**(config | {"model_type": "deepseek_v3"}))
    return DeepseekV3ForCausalLM.from_pretrained(folder, config=known, dtype=torch.float32).eval()
