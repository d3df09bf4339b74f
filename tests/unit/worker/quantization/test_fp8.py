"""FP8 on trainer ranks: a shard has the blocks of the whole matrix, or is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api.catalog.architectures import ARCHITECTURES, architecture
from grpo_operator.plan.planner.model.parameters import fp8_parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.quantization.fp8 import (
    FP8,
    FP8_BLOCK,
    BlockCutError,
    blocks,
    dequantise,
    is_quantised,
    quantise,
    quantised_parts,
)

NAME = "model.layers.3.mlp.experts.7.gate_proj.weight"
shapes = st.tuples(st.integers(1, 400), st.integers(1, 400))


def random(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[0])[:, None]


@given(shape=shapes)
def test_every_value_is_within_half_a_step_of_its_block(shape: tuple[int, int]) -> None:
    values = random(shape)
    q, scale = quantise(values)
    assert q.dtype == FP8 and scale.dtype == torch.float32 and scale.shape == blocks(shape)
    back = dequantise(q.float(), scale)
    step = torch.maximum(values.abs() / 16, dequantise(torch.full(shape, 2.0**-9), scale))
    assert ((back - values).abs() <= step * 1.0001).all()


def test_requantising_fp8_values_changes_nothing() -> None:
    """The values bitwise, and the scales to the last place."""
    q, scale = quantise(random((300, 260)))
    again, scale_again = quantise(dequantise(q.float(), scale))
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.allclose(scale_again, scale, rtol=2e-7, atol=0)


def test_zero_blocks_stay_zero_and_large_values_stay_finite() -> None:
    q, scale = quantise(torch.zeros(130, 5))
    assert (q.float() == 0).all() and (scale == 1).all()
    extreme = torch.full((1, 1), torch.finfo(torch.float32).tiny * 1000)
    assert quantise(extreme)[0].float().isfinite().all()


@given(dim=st.integers(0, 1), pieces=st.integers(1, 4), rest=st.integers(1, 128), bf16=st.booleans())
def test_shards_at_block_boundaries_equal_the_whole(dim: int, pieces: int, rest: int, bf16: bool) -> None:
    size = FP8_BLOCK * (pieces - 1) + rest
    shape = (size, 70) if dim == 0 else (70, size)
    whole = random(shape).to(torch.bfloat16 if bf16 else torch.float32)
    q, scale = quantise(whole)
    parts = [
        (NAME, shape, dim, offset, piece)
        for offset, piece in zip(range(0, size, FP8_BLOCK), torch.split(whole, FP8_BLOCK, dim), strict=True)
    ]
    found = list(quantised_parts(parts))
    assert [name for name, *_ in found] == [NAME, f"{NAME}_scale_inv"] * pieces
    for name, of, along, offset, tensor in found:
        wanted = q if name == NAME else scale
        assert of == tuple(wanted.shape) and along == dim
        expected = wanted.narrow(dim, offset, tensor.shape[dim])
        assert torch.equal(tensor.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("offset", "length"), [(64, 128), (0, 192)])
def test_a_split_block_is_refused_with_a_remedy(offset: int, length: int) -> None:
    part = (NAME, (512, 8), 0, offset, torch.zeros(length, 8))
    with pytest.raises(
        BlockCutError, match=rf"{NAME}: rows {offset} to .*smaller trainer.parallelism.tensor"
    ):
        list(quantised_parts([part]))


def test_the_names_are_those_of_deepseeks_checkpoint() -> None:
    hf = architecture("deepseek-v3")
    names = family_of(hf).shapes(hf)
    eight = sum(shape[0] * shape[1] for name, shape in names.items() if is_quantised(name))
    assert eight == fp8_parameters(ModelShape.from_hf(hf))
    plain = {name.split(".", 3)[-1] for name in names if "layers.3." in name and not is_quantised(name)}
    assert plain == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
    }  # fmt: skip
    assert not is_quantised("model.layers.61.eh_proj.weight") and not is_quantised("lm_head.weight")


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {"deepseek-v3"}))
def test_projections_are_quantised_and_biases_are_not(name: str) -> None:
    hf = architecture(name) | {"num_hidden_layers": 4}
    names = family_of(hf).shapes(hf)
    eight = {name for name in names if is_quantised(name)}
    assert sum(math.prod(names[name]) for name in eight) == fp8_parameters(ModelShape.from_hf(hf))
    assert all(name.endswith(("_proj.weight", "_with_mqa.weight")) for name in eight)


def test_unquantised_tensors_pass_through_unchanged() -> None:
    tensor = torch.ones(5)
    part = ("model.norm.weight", (5,), 0, 0, tensor)
    assert list(quantised_parts([part])) == [part]
