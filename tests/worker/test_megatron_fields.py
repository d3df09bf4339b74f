"""spec.trainer.megatron: the table of Megatron-Core's fields, and the way of a field to the models."""

from pathlib import Path

import pytest
import torch
import yaml

from grpo_operator.api.catalog.architectures import ARCHITECTURES
from grpo_operator.api.catalog.megatron import fields
from grpo_operator.api.catalog.megatron.fields import FIELDS, OPEN, problem
from grpo_operator.plan.planner.model.shape import KNOWN
from support.ranks.launcher import run as run_on_ranks

TABLE = Path(fields.__file__).with_name("fields.json")


def test_the_table_is_that_of_the_installed_version() -> None:
    (generated,) = run_on_ranks("megatron_cases:table", 1)
    assert TABLE.read_text() == generated, "run `make megatron-fields`"


def test_the_catalog_has_a_model_of_every_family() -> None:
    assert {hf["model_type"] for hf in ARCHITECTURES.values()} >= set(KNOWN)


def test_a_job_cannot_set_what_the_trainer_sets() -> None:
    (ours,) = run_on_ranks("megatron_cases:set_by_us", 1)
    assert len(ours) > 60 and {"moe_enable_routing_replay", "recompute_granularity", "bf16"} <= ours
    assert {"finalize_model_grads_func", "grad_scale_func"} <= ours, "set when the configuration exists"
    assert ours <= FIELDS.keys()
    assert ours & set(OPEN) == set(), "add them to operator/grpo_operator/api/catalog/megatron/owned.py"


def test_the_spec_is_where_ranks_read_the_fields() -> None:
    spec = yaml.safe_load((Path(__file__).parents[2] / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    spec["trainer"]["megatron"] = {"moe_z_loss_coeff": 0.25}
    assert run_on_ranks("megatron_cases:of_a_spec", 1, spec=spec) == [{"moe_z_loss_coeff": 0.25}]


def test_a_field_reaches_every_chunk_of_every_model(tmp_path: Path) -> None:
    given = {"moe_z_loss_coeff": 0.25, "variable_seq_lengths": True}
    for models in run_on_ranks("megatron_cases:reached", 2, root=str(tmp_path / "judge"), megatron=given):
        assert models == {
            model: [given, given] for model in ("policy", "reference", "critic", "reward model")
        }


def test_a_field_changes_the_gradient_as_it_should() -> None:
    plain, some, twice = (
        run_on_ranks("megatron_cases:gradient", 1, layout={}, megatron=megatron)[0]
        for megatron in ({}, {"moe_z_loss_coeff": 0.1}, {"moe_z_loss_coeff": 0.2})
    )
    routers = [name for name in plain if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    for name in routers:
        added = some[name] - plain[name]
        assert added.norm() > 0.1 * plain[name].norm(), name
        torch.testing.assert_close(twice[name] - plain[name], 2 * added, rtol=1e-3, atol=1e-6)
    # The loss of the last router does not depend on what comes after it.
    torch.testing.assert_close(some["lm_head.weight"], plain["lm_head.weight"])


@pytest.mark.parametrize(
    ("megatron", "text"),
    [
        (
            {"moe_pad_expert_input_to_capacity": True},
            "spec.trainer.megatron={moe_pad_expert_input_to_capacity: True}: Megatron-Core refuses it with "
            "this model and layout: moe_expert_capacity_factor must be set",
        ),
        (
            {"enable_cuda_graph": True, "external_cuda_graph": True},
            "megatron={enable_cuda_graph: True, external_cuda_graph: True}: Megatron-Core",
        ),
    ],
)
def test_what_only_megatron_core_refuses_is_named(megatron: dict[str, object], text: str) -> None:
    assert all(problem(name, value) is None for name, value in megatron.items()), "the operator accepts it"
    (error,) = run_on_ranks("megatron_cases:refusal", 1, megatron=megatron)
    assert text in error and error.endswith(": change or remove the field")


def test_a_field_gets_no_blame_for_the_layout() -> None:
    (error,) = run_on_ranks(
        "megatron_cases:refusal",
        1,
        megatron={"moe_pad_expert_input_to_capacity": False},
        layout={"tensor": 8},
    )
    assert error.startswith("trainer.parallelism.tensor=8 must divide")
