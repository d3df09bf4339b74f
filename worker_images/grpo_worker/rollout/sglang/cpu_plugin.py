"""SGLang plugin: the stock engine serves MLA models, reproducibly, on a CPU.

SGLang loads it in each of its processes through the entry point group
``sglang.srt.plugins``. It is active only with ``SGLANG_USE_CPU_ENGINE=1`` and does
nothing on a GPU. Five properties of SGLang 0.5.23 make it necessary:

* the ``torch_native`` attention backend implements MLA in its absorbed form only, but
  prefill is dispatched to the unabsorbed one, and the first forward fails on shapes;
* seeded sampling is refused for backends that are not on SGLang's list of deterministic
  ones. ``torch_native`` attends to one sequence at a time, so it belongs there;
* the batch-invariant kernels and the hash that come with seeded sampling are compiled for
  accelerators only;
* the buffer of routed experts is registered with CUDA as pinned memory;
* a paused engine polls without sleeping, even with ``--sleep-on-idle``. An engine whose update was aborted
  stays paused until it receives a complete version, and would take a core from the processes that send it.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

_BATCH_INVARIANT = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"
_SEEDED_SAMPLING = "sglang.srt.layers.sampler.multinomial_with_seed"
_HOST_MEMORY = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"
_PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
_ATTENTION = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"


def register() -> None:
    """Entry point: register the hooks when this process is a CPU engine."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    HookRegistry.register(_ATTENTION, _absorbed_mla, HookType.AROUND)
    HookRegistry.register(_BATCH_INVARIANT, _no_accelerator_kernels, HookType.REPLACE)
    HookRegistry.register(_SEEDED_SAMPLING, gumbel_max, HookType.REPLACE)
    HookRegistry.register(_HOST_MEMORY, _unpinned, HookType.AROUND)
    HookRegistry.register(_PAUSED, _rest, HookType.AROUND)
    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def _absorbed_mla(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose absorbed MLA for prefill as well as for decode."""
    # Imported here, not at plugin load: the model package pulls in most of SGLang.
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    original(module, *args, **kwargs)  # records module.current_attention_backend
    return AttnForwardMethod.MLA


def _unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Allocate without pinning: there is no device to pin memory for."""
    return original(*args, **(kwargs | {"pin_memory": False}))


def _rest(original: Callable[..., Any], scheduler: Any) -> None:
    """Sleep until the next request arrives, as an idle engine does."""
    original(scheduler)
    scheduler.maybe_sleep_on_idle()


def _no_accelerator_kernels(_runner: Any) -> None:
    """Do nothing: PyTorch's own CPU kernels stay in use."""


def gumbel_max(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample one token per row; the draw depends on (seed, position, token) alone.

    logprobs: [batch, vocab], any float dtype, need not be normalised.
    seed: [batch] int64, one per request. positions: [batch] int64, index in the sequence.
    Returns [batch, 1] int64 token indices, distributed as softmax(logprobs).
    """
    token = torch.arange(logprobs.shape[1], device=logprobs.device)
    row = _mix(seed.long() * 0x9E3779B1 + positions.long())
    bits = _mix(row[:, None] ^ (token[None, :] * 0x85EBCA77))
    uniform = ((bits & 0x1FFFFFFFFFFFFF).double() + 0.5) / 2.0**53
    gumbel = -torch.log(-torch.log(uniform))
    return torch.argmax(logprobs.double() + gumbel, dim=1, keepdim=True)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply a bijective 64-bit mixer (the finaliser of SplitMix64), in wrapping int64 arithmetic."""
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right, filling with zeros (torch fills with the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
