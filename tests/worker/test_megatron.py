"""Megatron-Core on gloo ranks: fidelity, layouts, checkpoints."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}


@pytest.fixture(scope="module")
def single() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and weights of one rank: the reference of all layouts."""
    return tuple(ranks.run("policy_cases:log_probs", 1, layout={})[0])  # type: ignore[return-value]


def test_log_probs_equal_those_of_transformers() -> None:
    """fp32, same weights: the mapping of config.json and of every tensor is right."""
    (difference,) = ranks.run("parity_case:difference", 1)
    assert difference < 5e-6


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, TP2_EP2), (2, {"expert": 2})],
    ids=["tp2-ep2", "dp2-ep2"],
)
def test_every_layout_starts_from_the_same_weights_and_gives_the_same_log_probs(
    world: int, layout: dict[str, int], single: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    results = ranks.run("policy_cases:log_probs", world, layout=layout)
    log_probs, weights = results[0]
    assert weights.keys() == single[1].keys()
    assert all(torch.equal(weights[name], single[1][name]) for name in weights)
    assert torch.allclose(log_probs, single[0], atol=5e-6)


def test_training_steps_agree_between_layouts() -> None:
    one = ranks.run("policy_cases:steps", 1, layout={}, count=3)[0]
    for rank in ranks.run("policy_cases:steps", 2, layout=TP2_EP2, count=3):
        for mine, reference in zip(rank, one, strict=True):
            for name, value in reference.items():
                assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_recomputing_activations_changes_no_step() -> None:
    kept = ranks.run("policy_cases:steps", 2, layout=TP2_EP2, count=2)
    assert ranks.run("policy_cases:steps", 2, layout=TP2_EP2, count=2, recompute=True) == kept


def test_resume_from_an_asynchronous_checkpoint_is_bitwise(tmp_path: Path) -> None:
    for rank in ranks.run("policy_cases:save_and_resume", 2, root=str(tmp_path), layout=TP2_EP2):
        assert rank["resumed"] == rank["undisturbed"]
        assert rank["weights_equal"]
    assert (tmp_path / "step-00000001" / "COMMITTED").is_file()


def test_every_cpu_fix_still_finds_its_module() -> None:
    """An upgrade of megatron-core that moves a module would silently drop its fix."""
    code = (
        "from grpo_worker.megatron import cpu_platform, cpu_fixes; cpu_platform.install();"
        "import grpo_worker.megatron.checkpoint;"
        "import megatron.core.dist_checkpointing.strategies.filesystem_async;"
        "assert cpu_fixes.APPLIED == set(cpu_fixes.FIXES), set(cpu_fixes.FIXES) - cpu_fixes.APPLIED;"
        "assert cpu_platform.Rewrite.hits > 100"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_import_hook_refuses_to_come_too_late() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core');"
        "from grpo_worker.megatron import cpu_platform; cpu_platform.install()"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "must run before megatron.core is imported" in done.stderr
