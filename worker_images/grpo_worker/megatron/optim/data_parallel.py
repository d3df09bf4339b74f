"""Megatron-Core's data parallelism, whose collectives run beside the passes on GPUs.

A bucket's gradients are reduced while the backward pass computes those of the layers before it. Updated
weights are gathered while the host prepares the next pass, and while that computes the layers before them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

# Elements of a bucket that a rank keeps: twice as many as a chunk of a checkpoint has at most. With smaller
# buckets (Megatron-Core's hold 1 to 5 million of each rank) a chunk would belong to many ranks, and each
# would read all of it.
SHARD = 2**25
# On CPUs collectives would take the cores of the passes. Besides, with torch 2.14 a process that has several
# collectives of gloo under way ends with a corrupted heap in one of about a thousand steps.
OVERLAP = torch.cuda.is_available()


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced together: ``ranks`` equal shards.

    After the backward passes the shard of rank ``own`` has the sum over all ranks, and the other shards have
    what this rank computed.
    """

    values: torch.Tensor
    ranks: int
    own: int


class DataParallel:
    """Wrapped model chunks of one rank, with their buffers of weights and gradients.

    ``fp32_gradients``: else they are accumulated and reduced in the weights' dtype.
    """

    def __init__(self, chunks: Sequence[Any], fp32_gradients: bool) -> None:
        config = chunks[0].config
        # Autograd loses a weight that it saves beside offloaded activations, and then has no gradient whose
        # arrival Megatron-Core could wait for.
        self._overlap = OVERLAP and not config.fine_grained_activation_offloading
        self.wrapped = [
            _wrap(chunk, number, fp32_gradients, self._overlap) for number, chunk in enumerate(chunks)
        ]
        config.finalize_model_grads_func = finalize_model_grads
        # Gradients are reduced in the last micro-batch's backward pass.
        contexts = [ddp.no_sync for ddp in self.wrapped]
        config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]

    def buffers(self) -> Iterator[Any]:
        """Return Megatron-Core's contiguous buffers of weights and gradients."""
        for ddp in self.wrapped:
            yield from ddp.buffers
            yield from ddp.expert_parallel_buffers

    def gradient_buckets(self) -> Iterator[GradientBucket]:
        """Return the buckets in which gradients are reduced."""
        for buffer in self.buffers():
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                yield GradientBucket(bucket.grad_data, group.size(), group.rank())

    def begin(self) -> None:
        """Prepare the backward passes of an optimizer step: zero the gradients."""
        for ddp in self.wrapped:
            ddp.train()
            ddp.zero_grad_buffer()

    def start_gather(self) -> None:
        """Start to gather the weights that ranks have updated; a module's forward pass waits for its own."""
        if self._overlap:
            for ddp in self.wrapped:
                ddp.start_param_sync()

    def finish_gather(self) -> None:
        """Wait until all weights are gathered, on the GPU for work that follows."""
        for ddp in self.wrapped:
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)


def _wrap(chunk: Any, number: int, fp32_gradients: bool, overlap: bool) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=fp32_gradients,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        align_param_gather=overlap,  # the gathers of all buckets start after the optimizer step
        bucket_size=SHARD * parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    # The later chunks of a stage are computed beside others, which hide their collectives.
    ddp = DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
    ddp.broadcast_params()
    ddp.start_param_sync(force_sync=True)  # else the first forward pass would gather equal weights
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            # Transformer Engine's products then add to DDP's gradients, which exist from here on.
            module.fuse_wgrad_accumulation = True
    return ddp
