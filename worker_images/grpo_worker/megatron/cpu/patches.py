"""Patches of Megatron-Core 0.16.1 on a CPU that replacing names cannot do: one function per module.

Each runs right after the import hook of ``platform`` has loaded its module. ``APPLIED`` lists the patches
that ran, so that a test notices when an upgrade of megatron-core leaves one without its target.
"""

import logging
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

APPLIED: set[str] = set()


def apply(module: types.ModuleType) -> None:
    """Apply the patch of a freshly loaded megatron module, if it has one."""
    name = module.__name__.removeprefix("megatron.core.")
    fix = FIXES.get(name)
    if fix:
        fix(module)
        APPLIED.add(name)


def _random(module: Any) -> None:
    """Use the CPU generator: CUDA RNG calls are queued until CUDA starts, which never happens here."""
    module._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    noise = "CPU RNG state changed"
    logging.getLogger(module.__name__).addFilter(lambda r: noise not in r.getMessage())


def _mappings(module: Any) -> None:
    """Gather parts of unequal sizes (expert TP > 1): gloo's all_gather needs equal ones, so pad and cut."""
    original = module._gather_along_first_dim

    def gather(
        tensor: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            result = original(tensor, group, output_split_sizes, use_global_buffer)
            assert isinstance(result, torch.Tensor)
            return result
        sizes = [int(size) for size in output_split_sizes]
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    module._gather_along_first_dim = gather


FIXES: dict[str, Callable[[Any], None]] = {
    "tensor_parallel.random": _random,
    "tensor_parallel.mappings": _mappings,
}
