"""SGLang plugin: sampling by the request's seed, with ``min_p`` too, and references to routed experts.

Two properties of SGLang 0.5.23 make it necessary:

* the seed of a request is ignored unless the engine is deterministic. All attention replicas of an engine
  then draw from equal streams of random numbers, and samples of one prompt that run in the same row of two
  replicas come out equal;
* the scheduler exits when a request has a seed and ``min_p``. Seeded sampling picks the largest sum of a
  log-probability and noise, so probabilities need not add up to one: the plugin sets those below ``min_p`` to
  zero beforehand.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

SAMPLING = "GRPO_SAMPLING"  # variable; "sglang": requests without a seed are to differ, as users expect
_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_NO_SEED = 42  # as in SGLang
_SAMPLING = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"


def register() -> None:
    """Entry point: register the hooks in each of SGLang's processes; those of sampling only for jobs."""
    from grpo_worker.rollout.sglang import control_plugin

    control_plugin.register()
    if os.environ.get(SAMPLING) == "sglang":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from grpo_worker.rollout.sglang import experts_plugin

    experts_plugin.register()

    HookRegistry.register(_SAMPLING, _min_p_first, HookType.AROUND)
    HookRegistry.register(_BATCH, _with_seeds, HookType.AROUND)


def _with_seeds(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the batch's sampling parameters with a seed for each request."""
    info = original(*args, **kwargs)
    if info.sampling_seed is None:
        batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "reqs"))
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        seeds = [_NO_SEED if seed is None else seed for seed in seeds]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
    return info


def _min_p_first(
    original: Callable[..., Any],
    probs: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps: Any,
    need_min_p_sampling: bool,
    sampling_seed: Any,
    positions: Any,
    **kwargs: Any,
) -> Any:
    """Apply ``min_p`` before top-k and top-p.

    probs: [batch, vocab]. All three drop the least likely tokens, and nothing is normalised in between, so
    the order does not change which tokens remain.
    """
    if need_min_p_sampling and sampling_seed is not None:
        least = probs.max(dim=-1, keepdim=True).values * min_ps.view(-1, 1)
        probs, need_min_p_sampling = probs.masked_fill(probs < least, 0.0), False
    return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **kwargs)
