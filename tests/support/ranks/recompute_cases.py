"""Functions that run on ranks: gradients under recomputation, and the bytes that a forward pass keeps."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer.mlp import MLP
from torch.autograd.graph import saved_tensors_hooks

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.megatron.families.base import MTP_LAYER
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from grpo_worker.megatron.model.core_attention import CoreAttention
from grpo_worker.megatron.model.kernels import RMSNorm
from grpo_worker.megatron.training.policy import PolicyModel
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import SEED, batch, everywhere, make_model, own_rows, update, whole_weights
from support.recompute import recompute_of
from support.tiny_models import tiny_model


def refused(recompute: str) -> str:
    """Return why a rank without Transformer Engine cannot recompute this, or ""."""
    initialize_parallel(Layout(world=1), SEED)
    try:
        build_chunks(tiny_model("deepseek_v3"), Layout(world=1), recompute=recompute_of(recompute))
    except ValueError as error:
        return str(error)
    return ""


def gradients(
    model: str, layout: dict[str, int], recompute: str, packed: bool = False
) -> dict[str, torch.Tensor]:
    """Return the gradient of a step under Hugging Face names."""
    return _step(
        make_model(tiny_model(model), layout, max_tokens=80 if packed else None, recompute=recompute)
    )


def with_mtp(layout: dict[str, int], recompute: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the forward passes of the layer of multi-token prediction in a step, and the gradient."""
    hf = tiny_model("deepseek_v3") | {"num_nextn_predict_layers": 1}
    policy, passes = make_model(hf, layout, max_tokens=80, recompute=recompute, mtp=True), []
    layer = getattr(policy.chunks[-1], MTP_LAYER).inner_layer
    layer.register_forward_hook(lambda *_: passes.append(1))
    found = _step(policy)
    return len(passes), found


def passes(layout: dict[str, int], recompute: str) -> dict[str, int]:
    """Return how often this rank's layers, and parts of them, compute forward in an update.

    By the number of the layer in the model, from 1, or that and the name of a part.
    """
    policy, found = make_model(tiny_model("deepseek_v3"), layout, recompute=recompute), Counter[str]()
    for layer in (layer for chunk in policy.chunks for layer in chunk.decoder.layers):
        parts = {"": layer, " mlp": layer.mlp, " up": layer.self_attention.linear_kv_up_proj}
        for name, part in parts.items():
            part.register_forward_hook(partial(_count, found, f"{layer.layer_number}{name}"))
    _step(policy, found.clear)
    return dict(found)


def _count(found: Counter[str], name: str, *_: Any) -> None:
    found[name] += 1


def _step(policy: PolicyModel, before: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    """Return the gradient of an update. ``before``: called when the passes before it are done."""
    data = own_rows(batch(0))
    data["old_log_probs"] = everywhere(policy, data)
    data["ref_log_prob"] = data["old_log_probs"] - 0.1
    before()
    with patch.object(policy.trainable, "step", lambda: keep_gradients(policy)):
        update(policy, data, kl=0.1)
    return whole_weights(policy)


# Each is one kernel on a GPU, which saves no value in between. On a CPU norms save normalised values,
# attention saves scores, its output, and scaled queries and keys in place of its inputs, and an MLP
# saves the parts of its activation.
UNFUSED = (RMSNorm, CoreAttention, MLP)


class Kept:
    """Bytes that a block's layers keep for their backward pass, without those between operations of UNFUSED.

    The block's last norm is not one of a layer.
    """

    def __init__(self, block: Any) -> None:
        self._last_norm = block.final_layernorm
        self._path: list[tuple[Any, set[int]]] = []  # modules that compute, with storages that they may save
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._alive: list[Any] = []  # so that no address is used twice
        self._weights = {_address(parameter) for parameter in block.parameters()}
        for module in block.modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._path and self._path[-1][0] is not self._last_norm:
            module, known = self._path[-1]
            address = _address(tensor)
            between = isinstance(module, UNFUSED) and address not in known
            if not between and address not in self._weights:
                self._saved[address] = tensor.untyped_storage()
        return tensor

    def total(self) -> int:
        """Return the bytes that are still there: the storages of discarded tensors are empty."""
        return sum(storage.nbytes() for storage in self._saved.values())

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._path.append((module, self._addresses([*args, *kwargs.values()])))
        if isinstance(module, CoreAttention) and torch.is_grad_enabled():
            for tensor in args[:3]:
                self.pack(tensor)

    def _leave(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        self._path.pop()
        if self._path:
            self._path[-1][1].update(self._addresses(output if isinstance(output, tuple) else [output]))

    def _addresses(self, values: Iterable[Any]) -> set[int]:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._alive += tensors
        return {_address(tensor) for tensor in tensors}


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def kept_bytes(model: str, recompute: str, tokens: int) -> int:
    """Return the bytes that the layers keep after the forward pass of one sequence."""
    # The planner refuses dense layers between those with experts.
    hf = tiny_model(model) | {"max_position_embeddings": tokens, "mlp_only_layers": []}
    layout = Layout(world=1)
    initialize_parallel(layout, SEED)
    (chunk,) = build_chunks(hf, layout, recompute=recompute_of(recompute))
    ids = torch.randint(0, hf["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))
    kept = Kept(chunk.decoder)
    with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        logits = chunk(ids, torch.arange(tokens)[None], None)
    found = kept.total()
    del logits  # its graph holds what is saved
    return found
