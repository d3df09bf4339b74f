"""SGLang plugin of responses: references to routed experts, and ``min_p`` together with seeded sampling.

The scheduler of SGLang 0.5.23 exits when a request has both. Seeded sampling picks the largest sum of a
log-probability and noise, so probabilities need not add up to one: the plugin sets those below ``min_p`` to
zero beforehand.
"""

from collections.abc import Callable
from typing import Any

_SAMPLING = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"


def register() -> None:
    """Entry point: register the hooks in each of SGLang's processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from grpo_worker.rollout.sglang import experts_plugin

    experts_plugin.register()

    HookRegistry.register(_SAMPLING, _min_p_first, HookType.AROUND)


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
