"""Offload of activations to host memory between forward and backward pass, by Megatron-Core."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.utils import get_attr_wrapped_model

from grpo_operator.api.v1alpha1.offload import OffloadModule
from grpo_operator.api.v1alpha1.trainer import KernelChoice


def offload_fields(modules: Sequence[OffloadModule], kernels: KernelChoice) -> dict[str, Any]:
    """Return Megatron-Core's fields. Raises ValueError for kernels that cannot offload activations."""
    if not modules:
        return {}
    problem = _problem(kernels)
    if problem:
        raise ValueError(
            f"spec.trainer.offload.activations=[{', '.join(modules)}]: {problem}: use an image that has "
            "Transformer Engine with it, or remove activations"
        )
    return {"fine_grained_activation_offloading": True, "offload_modules": [str(m) for m in modules]}


def _problem(kernels: KernelChoice) -> str:
    if kernels is KernelChoice.LOCAL:
        return "these ranks compute without Transformer Engine"
    from megatron.core.extensions.transformer_engine import cpu_offload

    return "" if cpu_offload is not None else "this Transformer Engine has no module cpu_offload"


@contextmanager
def activations_offloaded(chunks: Sequence[Any], forward_only: bool) -> Iterator[None]:
    """Prepare Megatron-Core for the passes inside, if the model chunks offload activations.

    Passes without gradients keep no activations: there Megatron-Core must neither count the micro-batches
    nor free tensors.
    """
    config = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True).config
    if not config.fine_grained_activation_offloading:
        yield
    elif forward_only:
        config.fine_grained_activation_offloading = False
        try:
            yield
        finally:
            config.fine_grained_activation_offloading = True
    else:
        _manager().begin(chunks)
        yield


class _Manager(PipelineOffloadManager):  # type: ignore[misc]
    """Megatron-Core's manager, which learns the order of the tensors in each update and leaves weights alone.

    That of Megatron-Core 0.16.1 learns it once: an update with another number of micro-batches would copy
    back the tensors of another one, and packed sequences give each update its own number. It also marks
    weights that must stay, but autograd hands it tensors without these marks. While it learns, it copies the
    tensors of the last layers back before they have reached host memory. And it frees a large tensor of which
    autograd has saved parts that are too small to be copied, as those of experts with few tokens are.
    """

    def begin(self, chunks: Sequence[Any]) -> None:
        """Forget the last update. Pinned memory is kept for the next one.

        Call it while the weights of the model chunks are on the device.
        """
        self._weights = {
            weight.untyped_storage().data_ptr() for chunk in chunks for weight in chunk.parameters()
        }
        self._queue.clear()
        self._stages = None
        self._cached_chunks_forward: list[Any] = []
        self._cached_chunks_backward: list[Any] = []
        self.reset()

    def on_save_for_backward(self, tensor: torch.Tensor) -> Any:
        """Return what stands for a tensor that autograd saves: a weight for itself, else a tag."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights:
            return tensor
        stays = tensor.numel() < self.cur_forward_chunk().min_offloaded_tensor_size
        if stays and storage.nbytes() > tensor.nbytes:  # the whole may be freed
            tensor = tensor.clone()
        return super().on_save_for_backward(tensor)

    def on_get_saved_tensor(self, saved_state: Any) -> torch.Tensor:
        """Return the tensor that ``saved_state`` stands for."""
        if isinstance(saved_state, torch.Tensor):
            return saved_state
        self._reload(self.cur_backward_chunk(), saved_state[0])
        tensor: torch.Tensor = super().on_get_saved_tensor(saved_state)
        return tensor

    def _reload(self, chunk: Any, number: int) -> None:
        """Copy a group of tensors back, unless that has been started."""
        group = chunk.offload_groups[number - 1]
        if not any(isinstance(state, tuple) for state in group._tensors.values()):
            return
        here = torch.cuda.current_stream()
        chunk.h2d_stream.wait_stream(here)  # it reuses memory that may still be read
        chunk._groups_to_reload.remove(group)
        chunk._groups_to_reload.append(group)
        chunk.bulk_reload_group()  # of the last one, after it has reached host memory
        group.wait_reload_event(here)
        chunk._reloading_group.remove(group)

    def post_warmup_callback(self) -> None:
        """Fix no order after the first update, and gather no sizes from all ranks to print them."""


def _manager() -> _Manager:
    if not isinstance(PipelineOffloadManager.OFFLOAD_MGR, _Manager):
        PipelineOffloadManager.OFFLOAD_MGR = _Manager()
    manager: _Manager = PipelineOffloadManager.OFFLOAD_MGR
    return manager
