"""The engine's command line follows its fields."""

import shlex
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutTemplate
from grpo_operator.render.sglang_command import engine_command

WIDE = {
    "tensor_parallel": 32, "expert_parallel": 32, "attention_data_parallel": 32,
    "nodes_per_engine": 4, "gpus_per_node": 8,
}  # fmt: skip


def _arguments(**fields: Any) -> list[str]:
    pool = RolloutTemplate(engine=EngineSpec(**fields))
    return shlex.split(engine_command("/models/m", pool))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "deterministic": True}, True),
        ({"device": "cpu", "deterministic": False}, False),
    ],
)
def test_deterministic_kernels_are_on_where_replays_must_be_bitwise(
    fields: dict[str, Any], expected: bool
) -> None:
    assert ("--enable-deterministic-inference" in _arguments(**fields)) == expected


def test_engines_on_gpus_sample_by_the_seed_of_the_request() -> None:
    arguments = _arguments()
    assert arguments[arguments.index("--sampling-backend") + 1] == "pytorch"


def test_wide_engines_get_their_backend_and_head() -> None:
    plain, wide = _arguments(**WIDE), _arguments(**WIDE, moe_a2a_backend="deepep", dp_lm_head=True)
    assert wide[wide.index("--moe-a2a-backend") + 1] == "deepep" and "--enable-dp-lm-head" in wide
    assert "--moe-a2a-backend" not in plain and "--enable-dp-lm-head" not in plain


def test_engines_draft_a_chain_of_tokens() -> None:
    assert not any("speculative" in argument for argument in _arguments())
    arguments = _arguments(speculative="mtp", speculative_num_steps=2)
    given = {
        "algorithm": "NEXTN", "num-steps": "2", "eagle-topk": "1",
        "num-draft-tokens": "3",  # the drafted tokens and the one before them
    }  # fmt: skip
    for name, value in given.items():
        assert arguments[arguments.index(f"--speculative-{name}") + 1] == value
    default = _arguments(speculative="mtp")
    assert default[default.index("--speculative-num-steps") + 1] == "3"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_args": ["--speculative-accept-threshold-single", "0.9"]}, "extraArgs must not repeat"),
        ({"extra_args": ["--speculative-eagle-topk=4"]}, "extraArgs must not repeat what a field sets"),
        ({"speculative": "mtp", "device": "cpu"}, "speculative mtp needs device cuda.*instead of sampling"),
        ({"speculative": "mtp", "deterministic": True}, "deterministic exclude each other.*remove one"),
        ({"speculative": "mtp", "return_routed_experts": True}, "returnRoutedExperts exclude each other"),
        ({"extra_args": ["--tp-size", "4"]}, "extraArgs must not repeat what a field sets"),
        ({"extra_args": ["--moe-a2a-backend=mooncake"]}, "extraArgs must not repeat what a field sets"),
        ({"extra_args": ["--enable-deterministic-inference"]}, "extraArgs must not repeat"),
        ({"dp_lm_head": True}, "dpLmHead needs attentionDataParallel above 1"),
        ({"moe_a2a_backend": "deepep", "device": "cpu"}, "moeA2aBackend deepep needs device cuda"),
        (
            WIDE | {"moe_a2a_backend": "deepep", "expert_parallel": 8},
            "expertParallel equal to tensorParallel",
        ),
    ],
)
def test_what_sglang_would_refuse_or_change_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineSpec(**fields)


def test_other_arguments_of_sglang_are_passed_on() -> None:
    given = ["--attention-backend", "triton", "--cuda-graph-bs", "1", "16", "--load-format", "safetensors"]
    assert _arguments(extra_args=given)[-len(given) - 2 : -2] == given
