"""What a change of names cannot fix in Megatron-Core 0.16.1 on a CPU: one function a module.

Each runs right after its module is loaded by the import hook of ``cpu_platform``. The reason
stands with each; ``APPLIED`` lists those that ran, so that a test notices when an upgrade of
megatron-core leaves one without its target.
"""

import logging
import queue
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

APPLIED: set[str] = set()


def apply(module: types.ModuleType) -> None:
    """Run the fix of a freshly loaded megatron module, if it has one."""
    name = module.__name__.removeprefix("megatron.core.")
    fix = FIXES.get(name)
    if fix:
        fix(module)
        APPLIED.add(name)


def _random(module: Any) -> None:
    """CUDA RNG calls are queued until CUDA starts: without CUDA they would never run."""
    module._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    noise = "CPU RNG state changed"
    logging.getLogger(module.__name__).addFilter(lambda r: noise not in r.getMessage())


def _mla(module: Any) -> None:
    """Without Transformer Engine it imports mocks without an error; isinstance() on them fails."""
    module.HAVE_TE = False


def _moe_utils(module: Any) -> None:
    """The name is bound only when Transformer Engine is there, but always read."""
    module.__dict__.setdefault("te_general_gemm", None)


def _mappings(module: Any) -> None:
    """gloo's all_gather wants equal sizes: pad, gather, cut (expert TP > 1 reaches this)."""
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


def _distrib_optimizer(module: Any) -> None:
    """torch's Adam keeps ``step`` per parameter, Megatron's checkpoint keeps it per group."""
    cls = module.DistributedOptimizer
    original = cls._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    cls._set_main_param_and_optimizer_states = set_states


def _filesystem_async(module: Any) -> None:
    """Write with threads, not forked processes, from a snapshot.

    A Ray actor runs many threads, and a fork of it can inherit a held lock; the stock results
    queue spawns a manager process (5-9 s at the first save). ``tensor.to("cpu")`` copies
    nothing on a CPU, so the snapshot must be a clone or training overwrites it meanwhile.
    """
    writer = module.FileSystemWriterAsync

    def preload(buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        return [
            (path, key, (raw, [(item, t.detach().clone()) for item, t in tensors]))
            for path, key, (raw, tensors) in buckets
        ]

    def write(transforms: Any, _msc: bool, _rank: int, buckets: list[Any], results: Any) -> None:
        done: queue.Queue[Any] = queue.Queue()
        slots: queue.Queue[Any] = queue.Queue()
        threads = []
        for index, bucket in enumerate(buckets):
            slots.put(index)
            args = (transforms, index, bucket, done, slots, True)
            threads.append(threading.Thread(target=writer.write_preloaded_data, args=args))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        written = dict(done.get() for _ in buckets)
        errors = [value for value in written.values() if isinstance(value, Exception)]
        results.put(errors[0] if errors else written)

    module._get_write_results_queue = queue.Queue
    writer.preload_tensors = staticmethod(preload)
    writer.write_preloaded_data_multiproc = staticmethod(write)


FIXES: dict[str, Callable[[Any], None]] = {
    "tensor_parallel.random": _random,
    "transformer.multi_latent_attention": _mla,
    "transformer.moe.moe_utils": _moe_utils,
    "tensor_parallel.mappings": _mappings,
    "optimizer.distrib_optimizer": _distrib_optimizer,
    "dist_checkpointing.strategies.filesystem_async": _filesystem_async,
}
