"""Functions that run on ranks: fields of Megatron-Core's configuration that a job passes through."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from grpo_devcluster import megatron_fields
from grpo_operator.api.catalog.architectures import ARCHITECTURES
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_operator.api.v1alpha1.recompute import FULL
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.model import hf_config
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from grpo_worker.megatron.model.hf_config import mcore_config
from grpo_worker.megatron.model.kernels import transformer_engine_fields
from grpo_worker.megatron.model.token_dispatcher import DEEPEP
from grpo_worker.megatron.training.critic import CriticModel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.reward_model import RewardModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from grpo_worker.model_files.config import model_config
from grpo_worker.roles import trainer_models
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import SEED, batch, everywhere, own_rows, update, whole_weights
from support.ranks.reward_cases import save_classifier
from support.tiny_models import tiny_model

# One layout for every size, so that no field that depends on a size is left out.
LAYOUTS = (
    Layout(world=1),
    Layout(world=8, tensor=2, pipeline=2, context=2, expert=2, expert_tensor=2),
    Layout(world=2, pipeline=2, virtual_pipeline=2),
    Layout(world=2, pipeline=2, layers_in_first_stage=1, layers_in_last_stage=3),
)


def table() -> str:
    """Return the table of the installed Megatron-Core's fields."""
    return megatron_fields.render(megatron_fields.table())


def set_by_us() -> set[str]:
    """Return the fields that the trainer gives to Megatron-Core's configuration, or changes later."""
    seen = set(transformer_engine_fields()) | set(DEEPEP)
    with _recorded(seen) as configs:
        for layout in LAYOUTS:
            mcore_config(tiny_model("deepseek_v3"), layout, torch.bfloat16)
        for hf in ARCHITECTURES.values():  # models of every family
            mcore_config(hf, LAYOUTS[0])
        initialize_parallel(LAYOUTS[0], SEED)
        hf = tiny_model("deepseek_v3") | {"num_nextn_predict_layers": 1}
        setup = _setup(hf, LAYOUTS[0], {}, recompute=FULL, mtp=True, moe=MoeSpec(aux_loss_coefficient=0.1))
        PolicyModel(setup, OptimizerSpec(), 100, replay_routing=True)
        CriticModel(setup, OptimizerSpec(), 100)
        for config, before in configs:
            seen |= {name for name, value in vars(config).items() if before.get(name) is not value}
    return seen


@contextmanager
def _recorded(seen: set[str]) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Add the fields of each new configuration; yield the configurations as they are when they are new."""
    configs: list[tuple[Any, dict[str, Any]]] = []

    def recording(kind: Callable[..., Any]) -> Callable[..., Any]:
        def create(**fields: Any) -> Any:
            seen.update(fields)
            config = kind(**fields)
            configs.append((config, dict(vars(config))))
            return config

        return create

    with (
        patch.object(hf_config, "TransformerConfig", recording(TransformerConfig)),
        patch.object(hf_config, "MLATransformerConfig", recording(MLATransformerConfig)),
    ):
        yield configs


def of_a_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a job's spec passes to the models of a rank."""
    job = GRPOJobSpec.model_validate(spec)
    return dict(trainer_models._model_setup(job, model_config(job.model.path), 4).megatron)


def reached(root: str, megatron: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the fields as the chunks of each model have them."""
    layout = Layout(world=dist.get_world_size(), pipeline=2, virtual_pipeline=2)
    if dist.get_rank() == 0:
        save_classifier(Path(root), "qwen3")
    dist.barrier()
    initialize_parallel(layout, SEED)
    setup = _setup(tiny_model("deepseek_v3"), layout, megatron)
    policy = PolicyModel(setup, OptimizerSpec(), 100)
    models = {
        "policy": policy.chunks,
        "reference": policy.reference,
        "critic": CriticModel(setup, OptimizerSpec(), 100).trainable.chunks,
        "reward model": RewardModel(root, setup)._chunks,
    }
    return {
        model: [{name: getattr(chunk.config, name) for name in megatron} for chunk in chunks]
        for model, chunks in models.items()
    }


def gradient(layout: dict[str, int], megatron: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole gradient of one GRPO step under Hugging Face names, on every rank."""
    parallel = Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    setup = _setup(tiny_model("deepseek_v3"), parallel, megatron)
    policy = PolicyModel(setup, OptimizerSpec(lr=1e-3), 100, with_reference=False)
    data = own_rows(batch(0))
    data["old_log_probs"] = data["ref_log_prob"] = everywhere(policy, data)
    policy.trainable.step = lambda: keep_gradients(policy)  # type: ignore[method-assign]
    update(policy, data)
    return whole_weights(policy)


def refusal(megatron: dict[str, Any], layout: dict[str, int] | None = None) -> str:
    """Return why a model with these fields cannot be built."""
    sizes = layout or {}
    try:
        build_chunks(tiny_model("qwen3"), Layout(world=sizes.get("tensor", 1), **sizes), passed=megatron)
    except ValueError as error:
        return str(error)
    return "accepted"


def _setup(hf: dict[str, Any], layout: Layout, megatron: Mapping[str, Any], **more: Any) -> ModelSetup:
    return ModelSetup(hf, layout, SeededWeights(hf, SEED), MicroBatching(4), megatron=megatron, **more)
