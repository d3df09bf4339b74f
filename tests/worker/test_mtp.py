"""Multi-token prediction: its logits, its gradients in every layout, and the unchanged policy."""

from pathlib import Path

import pytest
import torch

from grpo_worker.megatron.families.registry import family_of
from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks

LAYOUTS: dict[str, tuple[int, dict[str, int], bool]] = {
    "one": (1, {}, False),
    "packed": (1, {}, True),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}, False),
    "pp2": (2, {"pipeline": 2}, False),
    "pp2-vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, False),
    "cp2": (2, {"context": 2}, False),
    "dp2-packed": (2, {}, True),
    "cp2-packed": (2, {"context": 2}, True),
    "tp2-pp2-ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}, False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_mtp_logits_equal_a_reference_and_files_keep_every_bit(name: str, tmp_path: Path) -> None:
    world, layout, packed = LAYOUTS[name]
    root = str(tmp_path / "hf")
    found = run_on_ranks("mtp_cases:guesses", world, root=root, layout=layout, packed=packed)
    assert all(rank["bitwise"] for rank in found)
    differences = [rank["difference"] for rank in found if rank["difference"] is not None]
    assert differences and max(differences) < 1e-5


@pytest.fixture(scope="module")
def one_rank() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run_on_ranks("mtp_cases:gradients", 1, layout={})[0]
    return found


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_gradients_are_equal_in_every_layout(name: str, one_rank: dict[str, torch.Tensor]) -> None:
    world, layout, packed = LAYOUTS[name]
    for found in run_on_ranks("mtp_cases:gradients", world, layout=layout, packed=packed):
        assert largest_gap(found, one_rank) < (1e-5,)


def test_the_mtp_loss_does_not_change_the_policy(one_rank: dict[str, torch.Tensor]) -> None:
    (without,) = run_on_ranks("mtp_cases:gradients", 1, layout={}, mtp=False)
    assert set(without) < set(one_rank) and all(torch.equal(t, one_rank[n]) for n, t in without.items())
    added = {name: one_rank[name] for name in one_rank.keys() - without.keys()}
    assert all(gradient.abs().sum() > 0 for name, gradient in added.items() if ".experts." not in name)


@pytest.mark.parametrize("layout", [{"tensor": 2, "expert": 2}, {"pipeline": 2}], ids=str)
def test_the_mtp_layer_learns_and_resumes_from_a_checkpoint(layout: dict[str, int], tmp_path: Path) -> None:
    for found in run_on_ranks("mtp_cases:learns_and_resumes", 2, root=str(tmp_path), layout=layout):
        losses = found["losses"]
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]
        assert found["again"]


def test_models_without_an_mtp_layer_are_refused() -> None:
    for hf in ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, {"model_type": "qwen3"}):
        with pytest.raises(ValueError, match=r"spec\.model\.multiTokenPrediction: needs a deepseek_v3 model"):
            family_of(hf).mtp_shapes(hf)
