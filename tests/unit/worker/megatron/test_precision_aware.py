"""Main weights in bf16 weights and 16 more bits."""

import pytest
import torch

from grpo_worker.megatron.optim.precision_aware import main_weights, remainders


def _from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).int().view(torch.float32)


def test_main_weights_return_from_rounded_weights_and_remainders() -> None:
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-20, 20, 2**16)
    main = torch.randn(2**16, generator=generator) * scale
    main = torch.cat([main, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0])])
    is_halfway = (main.view(torch.int32) & 0xFFFF) == 0x8000
    again = main_weights(main.bfloat16(), remainders(main, main.bfloat16()))
    assert torch.equal(again.view(torch.int32)[~is_halfway], main.view(torch.int32)[~is_halfway])


@pytest.mark.parametrize("sign", [0, 1 << 31], ids=["positive", "negative"])
@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F807FFF),  # PyTorch rounds it down to an even value
        (0x3F818000, 0x3F818000),  # and this one up
    ],
)
def test_a_main_weight_halfway_between_two_weights_moves_by_its_last_bit(
    bits: int, expected: int, sign: int
) -> None:
    main = _from_bits(sign | bits)
    again = main_weights(main.bfloat16(), remainders(main, main.bfloat16()))
    assert torch.equal(again, _from_bits(sign | expected))


@pytest.mark.parametrize(("main", "weight"), [(-1e-30, 0.0), (1e-30, -0.0), (3.0, 1.0), (-3.0, 1.0)])
def test_weights_of_another_model_give_the_main_weight_nearest_to_them(main: float, weight: float) -> None:
    weights = torch.tensor([weight]).bfloat16()
    (found,) = main_weights(weights, remainders(torch.tensor([main]), weights)).tolist()
    assert found == pytest.approx(weight, rel=2**-8, abs=1e-30)


def test_whole_main_weights_are_taken_as_they_are() -> None:
    main = torch.tensor([1.2345])
    assert main_weights(main.bfloat16(), main) is main
