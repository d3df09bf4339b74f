"""Layouts initialised and built by Megatron-Core itself, rank by rank, without peers.

torch's "fake" backend stands for the other ranks, so that worlds of 512 fit in one process; the
weights are on the meta device, so that DeepSeek-V3 itself does.
"""

import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from grpo_worker.megatron.cpu import platform as cpu_platform

cpu_platform.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from grpo_operator.api.catalog.architectures import architecture  # noqa: E402
from grpo_operator.api.v1alpha1.layout import Layout  # noqa: E402
from grpo_operator.plan.planner.model.shape import ModelShape  # noqa: E402
from grpo_operator.plan.planner.training.activations import Workload  # noqa: E402
from grpo_operator.plan.planner.training.memory import stage_memory  # noqa: E402
from grpo_operator.plan.planner.training.rules import problems  # noqa: E402
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel  # noqa: E402

# Files whose errors are refusals of a layout.
CHECKS = (
    "megatron/core/",
    "grpo_worker/megatron/model/hf_config.py",
    "grpo_operator/api/v1alpha1/layout.py",
    "grpo_operator/api/v1alpha1/stages.py",
)


class WrongLayersError(Exception):
    """Megatron-Core built another number of layers than the model has."""


@contextmanager
def fake_groups() -> Iterator[None]:
    """Replace the groups that Megatron-Core requests with the gloo backend by fake ones."""
    original = torch.distributed.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **(options | {"backend": "fake"}))

    with patch.object(torch.distributed, "new_group", new_group):
        yield


def stage_parameters(hf: dict[str, Any], layout: Layout, mtp: bool = False) -> list[int]:
    """Return the parameters on the first rank of each pipeline stage.

    Raises the error of Megatron-Core for a layout that it cannot run, and WrongLayersError.
    """
    counts, layers = [], 0
    for stage in range(layout.pipeline):
        # Pipeline is the outermost axis: stages are blocks of consecutive ranks.
        rank = stage * (layout.world // layout.pipeline)
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        try:
            with fake_groups():
                initialize_parallel(layout, seed=0)
            assert parallel_state.get_pipeline_model_parallel_rank() == stage
            with torch.device("meta"):
                chunks = build_chunks(hf, layout, mtp=mtp)
            layers += sum(len(chunk.decoder.layers) for chunk in chunks)
            counts.append(sum(p.numel() for chunk in chunks for p in chunk.parameters()))
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    # With one stage Megatron-Core takes the first stage's number for the whole model's.
    if layers != hf["num_hidden_layers"]:
        raise WrongLayersError(f"built {layers} layers")
    return counts


def random_case(seed: int) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Return a small random model and the sizes of a layout, valid or not."""
    draw = random.Random(seed)
    heads, experts = draw.choice([4, 6, 8, 8]), draw.choice([6, 8, 16])
    layers = draw.randint(3, 9)
    hf = architecture("tiny-moe") | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw.randint(0, min(2, layers)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "vocab_size": draw.choice([96, 98, 128]),
        "intermediate_size": draw.choice([96, 128, 98]),
        "moe_intermediate_size": draw.choice([20, 32]),
        "q_lora_rank": draw.choice([None, 48]),
    }
    pipeline = draw.choice([1, 1, 2, 3, 4])
    sizes: dict[str, int | None] = {
        "world": draw.choice([2, 8, 16, 64, 256, 512]),
        "tensor": draw.choice([1, 1, 2, 4]),
        "pipeline": pipeline,
        "context": draw.choice([1, 1, 2]),
        "expert": draw.choice([1, 2, 2, 4]),
        "expert_tensor": draw.choice([1, 1, 2]),
        "virtual_pipeline": draw.choice([1, 1, 1, 2]) if pipeline > 1 else 1,
        "layers_in_first_stage": draw.choice([None, None, 1, 2, 3]) if pipeline > 1 else None,
        "layers_in_last_stage": draw.choice([None, None, 1, 2]) if pipeline > 1 else None,
    }
    return hf, sizes


def disagreements(count: int) -> dict[str, Any]:
    """Return the random cases on which planner and Megatron-Core differ, and the number accepted."""
    differences, accepted = [], 0
    for seed in range(count):
        hf, sizes = random_case(seed)
        plan, runtime = planned(hf, sizes), built(hf, sizes)
        accepted += isinstance(plan, list)
        if isinstance(plan, list) != isinstance(runtime, list) or (
            isinstance(plan, list) and plan != runtime
        ):
            differences.append({"seed": seed, "sizes": sizes, "planner": plan, "megatron": runtime})
    return {"cases": count, "accepted": accepted, "disagreements": differences}


def planned(hf: dict[str, Any], sizes: dict[str, Any]) -> list[int] | str:
    """Return the planner's parameters on each stage, or its refusal."""
    model = ModelShape.from_hf(hf)
    try:
        layout = Layout(**sizes)
        refusals = problems(model, layout)
        if refusals:
            return "; ".join(refusals)
        return [stage.weights // 2 for stage in stage_memory(model, layout, Workload(64))]
    except ValueError as error:
        return str(error)


def built(hf: dict[str, Any], sizes: dict[str, Any], mtp: bool = False) -> list[int] | str:
    """Return Megatron-Core's parameters on each stage, or its refusal.

    Raises every other error, so that a defect of ours is not counted as a refusal.
    """
    try:
        return stage_parameters(hf, Layout(**sizes), mtp)
    except (AssertionError, ValueError, RuntimeError) as error:
        origin = traceback.extract_tb(error.__traceback__)[-1].filename
        if not any(checks in origin for checks in CHECKS):
            raise
        return f"{type(error).__name__}: {error}"[:300]
    except WrongLayersError as error:
        return str(error)


def all_built(cases: list[dict[str, Any]]) -> list[list[int] | str]:
    """Return the result of ``built`` for the arguments of each case."""
    return [built(**case) for case in cases]


def group_sizes(layouts: list[dict[str, int]]) -> list[list[int]]:
    """Return the sizes of this rank's real groups for each layout: tp, pp, cp, dp, ep, etp, expert-dp."""
    state, sizes = parallel_state, []
    for layout in layouts:
        initialize_parallel(Layout(**layout), seed=0)
        sizes.append(
            [
                state.get_tensor_model_parallel_world_size(),
                state.get_pipeline_model_parallel_world_size(),
                state.get_context_parallel_world_size(),
                state.get_data_parallel_world_size(),
                state.get_expert_model_parallel_world_size(),
                state.get_expert_tensor_parallel_world_size(),
                state.get_expert_data_parallel_world_size(),
            ]
        )
        state.destroy_model_parallel()
    return sizes


def main() -> None:
    """``planner_cases.py FUNCTION JSON``: print the function's result as JSON."""
    name, arguments = sys.argv[1:]
    functions: dict[str, Callable[..., Any]] = {
        "disagreements": disagreements, "built": built, "all_built": all_built
    }  # fmt: skip
    print(json.dumps(functions[name](**json.loads(arguments))))


if __name__ == "__main__":
    main()
