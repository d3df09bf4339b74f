"""Fields of Megatron-Core's configuration that a job passes through: which are accepted, and the errors."""

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_operator.api.catalog.megatron.fields import FIELDS, OPEN, problem
from grpo_operator.api.catalog.megatron.owned import OWNED
from grpo_operator.api.crd import structural
from grpo_operator.api.errors import describe
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.trainer import ParallelismSpec, TrainerSpec


def _trainer(megatron: Any) -> TrainerSpec:
    return TrainerSpec.model_validate({"nodes": 1, "gpusPerNode": 1, "megatron": megatron})


def _refusal(megatron: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        _trainer(megatron)
    return describe(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_z_loss_coeff", 0.001),
        ("moe_z_loss_coeff", 1),
        ("moe_shared_expert_overlap", True),
        ("cuda_graph_warmup_steps", 2),
        ("moe_token_drop_policy", "position"),
        ("moe_deepep_num_sms", 24),
        ("cp_comm_type", "p2p"),
        ("cp_comm_type", ["p2p", "a2a"]),
    ],
)
def test_a_field_that_nothing_else_sets_is_accepted_as_it_is(name: str, value: Any) -> None:
    spec = _trainer({name: value})
    assert spec.megatron == {name: value}
    assert TrainerSpec.model_validate(spec.wire()) == spec


def test_without_fields_nothing_is_passed() -> None:
    assert TrainerSpec.model_validate({"nodes": 1, "gpusPerNode": 1}).megatron == {}


def test_a_number_that_yaml_reads_as_a_string_is_a_number() -> None:
    assert _trainer({"moe_z_loss_coeff": "1e-3"}).megatron == {"moe_z_loss_coeff": 0.001}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"moe_shared_expert_overlpa": True},
            "moe_shared_expert_overlpa: Megatron-Core 0.16.1 has no such field; did you mean "
            "moe_shared_expert_overlap? (got True)",
        ),
        (
            {"moeZLossCoeff": 1},
            "moeZLossCoeff: Megatron-Core 0.16.1 has no such field; did you mean moe_z_loss_coeff? (got 1)",
        ),
        ({"☃": 1}, "☃: Megatron-Core 0.16.1 has no such field: remove it (got 1)"),
        ({"moe_z_loss_coeff": True}, "moe_z_loss_coeff: must be a number (got True)"),
        ({"moe_z_loss_coeff": "low"}, "moe_z_loss_coeff: must be a number (got 'low')"),
        ({"moe_z_loss_coeff": float("nan")}, "moe_z_loss_coeff: must be a number (got nan)"),
        ({"moe_z_loss_coeff": None}, "moe_z_loss_coeff: must be a number (got None)"),
        ({"cuda_graph_warmup_steps": 1.5}, "cuda_graph_warmup_steps: must be an integer (got 1.5)"),
        ({"cuda_graph_warmup_steps": "2"}, "cuda_graph_warmup_steps: must be an integer (got '2')"),
        (
            {"moe_pad_expert_input_to_capacity": 1},
            "moe_pad_expert_input_to_capacity: must be true or false (got 1)",
        ),
        ({"moe_token_drop_policy": "no"}, "moe_token_drop_policy: must be one of probs, position (got 'no')"),
        ({"cp_comm_type": [1]}, "cp_comm_type: must be a string or a list of strings (got [1])"),
        ({"timers": "x"}, "timers: the field takes a Python object, which a manifest cannot hold: remove it"),
        (
            {"tensor_model_parallel_size": 2},
            "tensor_model_parallel_size: set spec.trainer.parallelism.tensor instead (got 2)",
        ),
        ({"recompute_modules": ["mlp"]}, "recompute_modules: set spec.trainer.recompute instead"),
        ({"offload_modules": ["attn_norm"]}, "offload_modules: set spec.trainer.offload instead"),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm: the kernels of the layers determine it: set spec."),
        ({"moe_aux_loss_coeff": 1}, "moe_aux_loss_coeff: set spec.trainer.moe.auxLossCoefficient instead"),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type: set spec.trainer.moe.dispatcher"),
        ({"moe_enable_deepep": True}, "moe_enable_deepep: set spec.trainer.moe.dispatcher instead"),
        (
            {"moe_flex_dispatcher_backend": "hybridep"},
            "moe_flex_dispatcher_backend: set spec.trainer.moe.dispatcher instead",
        ),
        ({"moe_hybridep_num_sms": 8}, "moe_hybridep_num_sms: nothing in the trainer reads it"),
        ({"num_layers": 3}, "num_layers: it belongs to the model's architecture, which config.json determi"),
        ({"fp8": "hybrid"}, "fp8: set spec.trainer.precision instead"),
        ({"cpu_offloading": True}, "cpu_offloading: set spec.trainer.offload instead"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap: the trainer creates no communication buffers"),
        ({"qk_clip": True}, "qk_clip: nothing in the trainer reads it: remove it"),
        ({"params_dtype": "bf16"}, "params_dtype: set spec.trainer.precision instead"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_remedy(given: dict[str, Any], text: str) -> None:
    assert f"spec.megatron.{text}" in _refusal(given)


def test_every_refused_field_is_named() -> None:
    text = _refusal({"hidden_size": 8, "moe_z_loss_coeff": 0.1, "test_mode": 3})
    assert "spec.megatron.hidden_size: " in text and "spec.megatron.test_mode: " in text
    assert "moe_z_loss_coeff" not in text


def test_the_map_is_bounded() -> None:
    assert "at most 64" in _refusal({f"x{number}": 1 for number in range(65)})
    assert "valid dictionary" in _refusal([1])
    schema = structural(TrainerSpec)["properties"]["megatron"]
    assert schema.pop("description")
    assert schema == {"type": "object", "maxProperties": 64, "x-kubernetes-preserve-unknown-fields": True}


def test_the_owned_fields_exist_and_so_do_the_fields_that_their_remedies_name() -> None:
    assert OWNED.keys() <= FIELDS.keys()
    assert all(problem(name, 1) == remedy for name, remedy in OWNED.items())
    named = {word for remedy in OWNED.values() for word in remedy.split() if word.startswith("spec.")}
    for path in named:
        schema = structural(GRPOJobSpec)
        for part in path.split(".")[1:]:
            schema = schema["properties"][part]
    sizes = {field.alias for field in ParallelismSpec.model_fields.values()} - {"auto"}
    assert {f"spec.trainer.parallelism.{size}" for size in sizes} <= named


def test_a_manifest_can_write_every_open_field() -> None:
    samples: dict[str, Any] = {
        "bool": True, "int": 1, "float": 0.5, "str": "x", "list[int]": [1], "list[float]": [0.5],
        "list[str]": ["x"],
    }  # fmt: skip
    assert len(OPEN) > 30
    for name in OPEN:
        field = FIELDS[name]
        values = field.get("choices") or [samples[kind] for kind in field["types"]]
        assert [problem(name, value) for value in values] == [None] * len(values), name
