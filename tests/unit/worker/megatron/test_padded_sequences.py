"""Packed sequences in padded batches: attention and its gradients are those of each sequence alone."""

from itertools import accumulate

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from grpo_worker.megatron.model.padded_sequences import PaddedSequences

LENGTHS = ([5, 1, 64, 0, 7, 33, 2, 8, 65, 129, 66], [1], [40])
SHAPES: list[tuple[int, ...]] = []


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend causally over [s, b, heads, d]; return [s, b, heads * d]."""
    SHAPES.append(tuple(query.shape[:2]))
    q, k, v = (tokens.permute(1, 2, 0, 3) for tokens in (query, key, value))
    out: torch.Tensor = scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def tokens_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(count, 2, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for width in (6, 6, 4)
    ]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention_and_gradients_of_each_sequence_alone(lengths: list[int]) -> None:
    bounds = [0, *accumulate(lengths)]
    ours, alone = tokens_of(bounds[-1]), tokens_of(bounds[-1])
    out = PaddedSequences(bounds).attend(ours[0], ours[1], ours[2], attend)
    parts = zip(*(torch.split(tokens, lengths) for tokens in alone), strict=True)
    wanted = torch.cat([attend(*(t[:, None] for t in part))[:, 0] for part in parts if len(part[0])])
    assert torch.allclose(out, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    mine = torch.autograd.grad((out * weights).sum(), ours)
    theirs = torch.autograd.grad((wanted * weights).sum(), alone)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_batches_are_few_of_few_shapes_and_at_most_half_padding() -> None:
    lengths = [int(n) for n in torch.randint(1, 5000, (300,), generator=torch.Generator().manual_seed(2))]
    count = sum(lengths)
    SHAPES.clear()
    tokens = torch.zeros(count, 1, 1)
    PaddedSequences([0, *accumulate(lengths)]).attend(tokens, tokens, tokens, attend)
    assert len({length for length, _ in SHAPES}) <= 13, "one for each power of two"
    assert len(SHAPES) <= 7 * 9
    assert all(size.bit_count() == 1 for shape in SHAPES for size in shape)
    assert sum(s * b for s, b in SHAPES) < 2 * count


def test_short_sequences_share_batches_that_cudnn_accepts() -> None:
    lengths = [1] * 5 + [30] * 6
    SHAPES.clear()
    tokens = torch.zeros(sum(lengths), 1, 1)
    PaddedSequences([0, *accumulate(lengths)]).attend(tokens, tokens, tokens, attend)
    assert SHAPES == [(64, 8), (64, 2), (64, 1)]
