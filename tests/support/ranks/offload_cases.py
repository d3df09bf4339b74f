"""Functions that run on ranks: gradients with activations in host memory, by Megatron-Core's own code.

CPUs have no streams: here they do nothing, and copies are made at once. What is left is the order in which
Megatron-Core copies tensors out, frees them and copies them back. That it waits in between is checked.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadModule, OffloadSpec
from grpo_worker.megatron.model import activation_offload
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import SEED, batch, everywhere, make_model, own_rows, update, whole_weights
from support.tiny_models import tiny_model

ROWS = (16, 8, 24)  # of the batches: each update has another number of micro-batches


def refused(modules: list[str]) -> str:
    """Return why a rank without Transformer Engine cannot offload activations, or ""."""
    initialize_parallel(Layout(world=1), SEED)
    offloaded = tuple(OffloadModule(module) for module in modules)
    try:
        build_chunks(tiny_model("deepseek_v3"), Layout(world=1), offloaded=offloaded)
    except ValueError as error:
        return str(error)
    return ""


def small_part(size: int, part: int) -> bool:
    """Return whether a part of a tensor outlives it that is too small to be copied to host memory."""
    with _without_streams(set()):
        manager = activation_offload._Manager()
        manager.begin([])
        manager.init_model_chunk_offload_handler(None, None, size)
        chunk = manager.cur_forward_chunk()
        chunk.on_group_start_forward("expert_fc1")
        manager.inside_context = True
        whole = torch.arange(float(size))
        chunk.tensor_need_offloading_checker = lambda tensor: tensor.numel() >= size
        tag = manager.on_save_for_backward(whole[:part])
        chunk.on_group_commit_forward([whole])
        assert whole.untyped_storage().nbytes() == 0, "the whole was freed"
        manager._cur_backward_chunk = chunk
        return torch.equal(manager.on_get_saved_tensor(tag), torch.arange(float(part)))


def updates(
    model: dict[str, Any],
    layout: dict[str, int],
    modules: list[str],
    packed: bool = False,
    recompute: str = "none",
    mtp: bool = False,
) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Return the gradients of three updates with passes without gradients between them.

    Also the bytes that this rank has copied to host memory in each update.
    """
    offload = OffloadSpec(activations=[OffloadModule(module) for module in modules] or None)
    max_tokens = 80 if packed else None
    weights: set[int] = set()
    with _without_streams(weights) as copied:
        policy = make_model(
            model, layout, lr=0.0, max_tokens=max_tokens, recompute=recompute, offload=offload, mtp=mtp
        )
        weights |= {weight.untyped_storage().data_ptr() for weight in _parameters(policy)}
        gradients, each = [], []
        for rows in ROWS:
            gradients.append(_gradients(policy, rows))
            each.append(sum(copied))
            copied.clear()
    return gradients, each


def _gradients(policy: PolicyModel, rows: int) -> dict[str, torch.Tensor]:
    data = own_rows(batch(rows, rows))
    data["old_log_probs"] = everywhere(policy, data)
    data["ref_log_prob"] = everywhere(policy, data, reference=True) - 0.1
    weights = [parameter.detach().clone() for chunk in policy.chunks for parameter in chunk.parameters()]
    with patch.object(policy.trainable, "step", lambda: keep_gradients(policy)):
        update(policy, data, kl=0.1)
    found = whole_weights(policy)
    for parameter, weight in zip(_parameters(policy), weights, strict=True):
        parameter.data.copy_(weight)
    return found


def _parameters(policy: PolicyModel) -> Iterator[torch.nn.Parameter]:
    for chunk in policy.chunks:
        yield from chunk.parameters()


class _Stream:
    """A stream, or an event, of a device that computes everything at once."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name not in ("wait_stream", "wait_event", "record", "record_event"):
            raise AttributeError(name)
        return lambda *_: None


@contextmanager
def _without_streams(weights: set[int]) -> Iterator[list[int]]:
    """Let Megatron-Core offload on a CPU. Yields the bytes of each copy to host memory.

    ``weights``: addresses of storages that must not be copied.
    """
    copied: list[int] = []
    pool, handler = megatron.GPUTensorPool, megatron.ChunkOffloadHandler
    create, offload, check = pool.__init__, handler.offload, handler.tensor_need_offloading_checker
    reload, await_copies = handler.reload, megatron.OffloadTensorGroup.wait_offload_event
    arrived: list[torch.Tensor] = []  # in host memory, and waited for

    def pageable(self: Any, device: str = "cuda", pin_memory: bool = False) -> None:
        create(self, device, False)

    def counted(self: Any, tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True) -> Any:
        assert tensor.untyped_storage().data_ptr() not in weights, "a weight was copied to host memory"
        copied.append(tensor.nbytes)
        return offload(self, tensor, False, use_cpu_pool)

    def awaited(group: Any, stream: Any) -> None:
        arrived.extend(state[1] for state in group._tensors.values() if isinstance(state, tuple))
        await_copies(group, stream)

    def after_its_copy(self: Any, state: tuple[Any, ...], non_blocking: bool | None = None) -> torch.Tensor:
        assert any(copy is state[1] for copy in arrived), "a tensor was copied back without waiting for it"
        arrived[:] = [copy for copy in arrived if copy is not state[1]]
        tensor: torch.Tensor = reload(self, state, non_blocking)
        return tensor

    def any_size(self: Any, tensor: torch.Tensor) -> bool:
        self.min_offloaded_tensor_size = 1  # the models are tiny
        return bool(check(self, tensor))

    with ExitStack() as stack:
        for target, name, value in (
            (pool, "__init__", pageable),
            (handler, "offload", counted),
            (handler, "reload", after_its_copy),
            (megatron.OffloadTensorGroup, "wait_offload_event", awaited),
            (handler, "tensor_need_offloading_checker", any_size),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "Event", _Stream),
            (torch.cuda, "current_stream", _Stream),
            (torch.cuda, "stream", lambda _: ExitStack()),
            (torch.cuda.nvtx, "range_push", lambda _: None),
            (torch.cuda.nvtx, "range_pop", lambda: None),
            (torch.Tensor, "record_stream", lambda *_: None),
            (transformer_engine, "cpu_offload", SimpleNamespace()),
            (activation_offload, "_problem", lambda _: ""),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield copied
