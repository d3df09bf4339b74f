"""SGLang plugin: routed experts stay in the pod, and the response has a reference to them.

SGLang 0.5.23 sends the experts of a sample as int32 through its processes and in the response, encoded in
base64: 41 GB for a thousand samples of 16 k tokens of DeepSeek-V3. The scheduler that finishes a request
writes them as uint8 to a folder that the pod's agent serves, and puts the reference in their place.
"""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_operator.api.urls import host_port
from grpo_worker.data.expert_folder import ExpertFolder
from grpo_worker.data.routed_experts import PROBLEM, RoutedExperts, record_of

FOLDER = "GRPO_ROUTED_EXPERTS"  # variable with the folder; without it responses have the experts themselves
URL = "GRPO_ROUTED_EXPERTS_URL"  # variable with the URL of the pod's agent
_COLLECT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)


def register() -> None:
    """Register the hook in the schedulers of an engine that keeps routed experts."""
    if not os.environ.get(FOLDER):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_COLLECT, _keep, HookType.AROUND)


def _keep(original: Callable[..., Any], processor: Any, request: Any) -> None:
    """Keep the experts of a finished request in the pod."""
    from sglang.srt.runtime_context import get_parallel

    if request.return_routed_experts and get_parallel().attn_tp_rank != 0:
        return  # only the first rank answers
    original(processor, request)
    if request.routed_experts is not None:
        request.routed_experts = keep(request.routed_experts, _count(processor.model_config.hf_text_config))


def _count(config: Any) -> int:
    """Return the number of experts of a model."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return int(next(getattr(config, name) for name in names if getattr(config, name, None)))


def location(given: str) -> str:
    """Return a URL in which kubelet has put the pod's address; those of IPv6 need brackets."""
    scheme, _, place = given.partition("://")
    address, _, port = place.rpartition(":")
    return f"{scheme}://{host_port(address.strip('[]'), int(port))}"


def keep(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Write the experts of a sample; return the reference as JSON in a uint8 tensor, which SGLang sends.

    experts: int32 [tokens, layers, k] on the host. ``count``: number of experts of the model. If there is no
    room, the JSON has the error instead.
    """
    small = experts.numpy().astype(np.uint16 if count > 256 else np.uint8)
    record, digest = record_of(small.transpose(1, 0, 2))
    tokens, layers, topk = experts.shape
    key = uuid.uuid4().hex
    reference = RoutedExperts(location(os.environ[URL]), key, tokens, layers, topk, digest, wide=count > 256)
    answer = reference.to_json()
    try:
        ExpertFolder(Path(os.environ[FOLDER])).write(key, record)
    except OSError as error:  # an exception would end the scheduler, and with it the engine
        answer = {PROBLEM: f"{error}: raise engine.routedExpertsGibibytes"}
    return torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8)
