"""The update planner's view of trainer ranks equals the shards of real ranks."""

import pytest

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.training.stages import stage_layers
from grpo_worker.weightsync.planner.layouts import trainer_side
from support.ranks.launcher import run as run_on_ranks
from support.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"tensor": 2, "expert_tensor": 2}),
        (2, {"pipeline": 2, "layers_in_first_stage": 3}),
        (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
        (4, {"tensor": 2, "context": 2, "expert": 4}),
        (4, {"expert": 2}),
    ],
    ids=str,
)
def test_the_planners_trainer_side_equals_real_ranks(world: int, sizes: dict[str, int]) -> None:
    hf, layout = tiny_model("deepseek_v3"), Layout(world=world, **sizes)
    stages = {n: s for s, layers in enumerate(stage_layers(hf["num_hidden_layers"], layout)) for n in layers}
    planned = {
        (part.tensor, part.box.top, part.box.bottom, part.box.left, part.box.right, rank)
        for part in trainer_side(hf, layout, stages.__getitem__)
        for rank in part.ranks
    }
    real = {
        (*part, rank)
        for rank, parts in enumerate(run_on_ranks("sync_cases:held", world, layout=sizes))
        for part in parts
    }
    assert planned == real
