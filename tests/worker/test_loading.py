"""Reading Hugging Face files: slice by slice, also FP8, within a shard's memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grpo_worker.megatron.conversion.readers import SafetensorsWeights
from grpo_worker.megatron.families.registry import expert_layers, family_of
from support.ranks.launcher import run as run_on_ranks

MIB = 2**20


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"tensor": 2, "expert_tensor": 2})])
def test_loading_needs_memory_for_the_shard_and_two_tensors(
    world: int, layout: dict[str, int], tmp_path: Path
) -> None:
    for rank in run_on_ranks("loading_cases:peak", world, root=str(tmp_path), layout=layout):
        assert rank["taken"] <= rank["own"] + 2 * rank["largest"] + 8 * MIB, rank


@pytest.mark.parametrize(
    ("world", "layout"), [(1, {}), (2, {"tensor": 2, "expert": 2}), (2, {"pipeline": 2})]
)
def test_the_reference_is_copied_from_the_policy(world: int, layout: dict[str, int]) -> None:
    for rank in run_on_ranks("loading_cases:reads_with_reference", world, layout=layout):
        assert rank == {"reads": 1, "equal": True, "apart": True}


def _fp8_file(folder: Path, shape: tuple[int, int]) -> torch.Tensor:
    """Write a block-quantised tensor to a file; return its dequantised value."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = [-(-size // 128) for size in shape]
    scales = torch.rand(blocks, generator=generator) + 0.1
    save_file({"w": values, "w_scale_inv": scales, "plain": torch.ones(3)}, folder / "model.safetensors")
    whole = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(0, shape[1], 128):
            part = values[row, column : column + 128].float()
            whole[row, column : column + 128] = part * scales[row // 128, column // 128]
    return whole


@pytest.mark.parametrize("shape", [(256, 384), (300, 200)])
@pytest.mark.parametrize(("dim", "offset", "length"), [(0, 0, 200), (0, 100, 60), (1, 64, 128), (1, 130, 70)])
def test_fp8_slices_are_dequantised_by_their_blocks(
    tmp_path: Path, shape: tuple[int, int], dim: int, offset: int, length: int
) -> None:
    whole = _fp8_file(tmp_path, shape)
    reader = SafetensorsWeights(tmp_path)
    assert reader.shape("w") == shape
    assert torch.equal(reader.read("w", dim, offset, length), whole.narrow(dim, offset, length))
    assert torch.equal(reader.read("plain", 0, 1, 2), torch.ones(2))


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"spec\.model\.path: no safetensors files in"):
        SafetensorsWeights(tmp_path)
    _fp8_file(tmp_path, (128, 128))
    with pytest.raises(KeyError, match="other is in none of the safetensors files"):
        SafetensorsWeights(tmp_path).shape("other")


def test_unknown_architectures_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="'gpt2' is not supported: use one of deepseek_v3, glm4_moe, kimi_k2"
    ):
        family_of({"model_type": "gpt2"})


def test_router_replay_needs_a_model_with_experts() -> None:
    from support.tiny_models import tiny_model

    assert expert_layers(tiny_model("qwen3_moe")).moe == (0, 2, 3)
    with pytest.raises(ValueError, match="a qwen3 model has no experts"):
        expert_layers(tiny_model("qwen3"))
