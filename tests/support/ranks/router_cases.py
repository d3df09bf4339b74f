"""Functions that run on ranks: which tokens the routers count, and the gradient of their auxiliary loss."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.data.micro_batch import Batch
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.families.base import MTP_LAYER
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching, Runner
from grpo_worker.megatron.training.setup import ModelSetup
from support.padded import ragged
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import batch, everywhere, own_part, own_rows, update, whole_weights
from support.recompute import recompute_of
from support.tiny_models import tiny_model

HF = tiny_model("deepseek_v3") | {"num_nextn_predict_layers": 1}
SEED = 7
Counts = dict[str, torch.Tensor]


def policy_of(
    layout: dict[str, int], batching: MicroBatching, moe: MoeSpec, recompute: str = "none"
) -> PolicyModel:
    parallel = Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    reader = SeededWeights(HF, SEED)
    setup = ModelSetup(
        HF, parallel, reader, batching, recompute=recompute_of(recompute), mtp=True, moe=moe
    )  # fmt: skip
    return PolicyModel(setup, OptimizerSpec(lr=1e-3), 100, with_reference=False)


def refused(hf: str) -> str:
    """Return why the models of a rank cannot be built with another rate of the expert bias."""
    model, moe = tiny_model(hf), MoeSpec(bias_update_rate=0.01)
    try:
        ModelSetup(model, Layout(world=1), SeededWeights(model, SEED), moe=moe).balance_fields()
    except ValueError as error:
        return str(error)
    return ""


def data_of(rows: int, width: int) -> Batch:
    """Return rows of 18 to 32 tokens, padded to ``width`` with tokens that differ from those of the rows."""
    data = batch(0, rows=rows)
    extra = width - data["input_ids"].shape[1]
    padded = {name: torch.nn.functional.pad(column, (0, extra)) for name, column in data.items()}
    return padded | {"input_ids": torch.where(padded["attention_mask"], padded["input_ids"], 77)}


def counted(
    layout: dict[str, int],
    rows: int = 6,
    width: int = 32,
    micro_rows: int = 4,
    max_tokens: int | None = None,
    recompute: str = "none",
    rate: float = 0.001,
) -> dict[str, Any]:
    """Take one optimizer step.

    Returns the tokens of each expert by which Megatron-Core moved the biases of this rank's routers, how
    far it moved them, and the load figures.
    """
    moe = MoeSpec(bias_update_rate=rate)
    policy = policy_of(layout, MicroBatching(micro_rows, max_tokens), moe, recompute)
    data = own_rows(data_of(rows, width))
    data["old_log_probs"] = data["ref_log_prob"] = everywhere(policy, data)
    before = {name: router.expert_bias.clone() for name, router in _routers(policy)}
    with _tokens_of_updates() as seen:
        metrics = update(policy, data)
    names = list(before)
    return {
        "tokens": dict(zip(names, seen[0] if names else (), strict=True)),
        "moved": {name: router.expert_bias - before[name] for name, router in _routers(policy)},
        "load": {name: value for name, value in metrics.items() if name.startswith("moe/load_ratio")},
    }


def counted_by_hand(rows: int = 6) -> Counts:
    """Return the tokens of each expert in forward passes of one row each, which have no padding at all."""
    policy = policy_of({}, MicroBatching(), MoeSpec())
    mtp, counts = policy._mtp, dict[str, torch.Tensor]()
    assert mtp is not None
    for name, router in _routers(policy):
        router.register_forward_hook(_adding(counts, name))
    for chunk in policy.chunks:
        chunk.eval()
    wanted = {"guess": lambda _output, micro, width: micro.to_rows(mtp.log_probs(micro), width)}
    data = data_of(rows, 32)
    for row, length in enumerate(data["attention_mask"].sum(1).tolist()):
        alone = ragged({name: column[row : row + 1, :length] for name, column in data.items()})
        Runner(policy.layout, MicroBatching()).rows(policy.chunks, alone, wanted)
    return counts


def _adding(counts: Counts, name: str) -> Callable[[Any, Any, Any], None]:
    # The MTP layer has no input for the last token of a row: the token after it.
    real = slice(None, -1) if name == MTP_LAYER else slice(None)

    def add(_router: Any, _inputs: Any, outputs: Any) -> None:
        counts[name] = counts.get(name, 0) + outputs[1][real].sum(0)

    return add


def _routers(policy: PolicyModel) -> Iterator[tuple[str, Any]]:
    """Return the routers of this rank under names that are the same in every layout."""
    for chunk in policy.chunks:
        for path, module in chunk.named_modules():
            if isinstance(module, TopKRouter):
                yield MTP_LAYER if path.startswith(MTP_LAYER) else f"layer {module.layer_number}", module


@contextmanager
def _tokens_of_updates() -> Iterator[list[torch.Tensor]]:
    """Record the tokens [routers, experts] of all ranks in each of Megatron-Core's updates of the biases."""
    # By its name in sys.modules: the package exports a function of the same name.
    module: Any = sys.modules["megatron.core.distributed.finalize_model_grads"]
    original, seen = module.get_updated_expert_bias, list[torch.Tensor]()

    def recording(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        updated: torch.Tensor = original(tokens, *args, **kwargs)  # sums the tokens of all ranks in place
        seen.append(tokens.clone())
        return updated

    with patch.object(module, "get_updated_expert_bias", recording):
        yield seen


def gradients(
    layout: dict[str, int],
    coefficient: float,
    rows: int = 6,
    width: int = 32,
    max_tokens: int | None = None,
) -> Counts:
    """Return the whole gradient of one GRPO step under Hugging Face names, on every rank."""
    moe = MoeSpec(aux_loss_coefficient=coefficient)
    policy = policy_of(layout, MicroBatching(3, max_tokens), moe)
    return _gradients(policy, own_rows(data_of(rows, width)))


def gradients_of_uneven_rounds(layout: dict[str, int]) -> tuple[int, Counts]:
    """Return the same of three rows on an interleaved pipeline, which takes two micro-batches in a round."""
    policy = policy_of(layout, MicroBatching(1, max_tokens=32), MoeSpec(aux_loss_coefficient=0.1))
    return _idle(policy, data_of(3, 32))


def gradients_of_uneven_shares(layout: dict[str, int]) -> tuple[int, Counts]:
    """Return the micro-batches of this rank without a row, and the gradient.

    Of two data-parallel ranks one has three rows, of which no two fit into a micro-batch, the other one row.
    """
    policy = policy_of(layout, MicroBatching(1, max_tokens=32), MoeSpec(aux_loss_coefficient=0.1))
    share = slice(3, 4) if parallel_state.get_data_parallel_rank() else slice(0, 3)
    data = {name: column[share] for name, column in data_of(4, 32).items()}
    return _idle(policy, data)


def _idle(policy: PolicyModel, data: Batch) -> tuple[int, Counts]:
    idle = policy._runner.micro_batches(own_part(policy, data)).groups.count([])
    return idle, _gradients(policy, data)


def _gradients(policy: PolicyModel, data: Batch) -> Counts:
    data["old_log_probs"] = data["ref_log_prob"] = everywhere(policy, data)
    policy.trainable.step = lambda: keep_gradients(policy)  # type: ignore[method-assign]
    update(policy, data)
    return whole_weights(policy)
