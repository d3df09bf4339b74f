"""Tensors of a snapshot: parameters and the buffers that are part of the state."""

import pytest
import torch

from grpo_worker.megatron.checkpoint import snapshot
from grpo_worker.megatron.checkpoint.part import CheckpointPart


class Router(torch.nn.Module):
    """A module with a weight, a buffer that is trained, and one that grows with the sequences seen."""

    def __init__(self, longest: int, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value))
        self.register_buffer("expert_bias", torch.full((3,), value))
        self.register_buffer("cos_cached", torch.full((longest,), value), persistent=False)


def part(longest: int, value: float) -> CheckpointPart:
    layers = torch.nn.Sequential(Router(longest, value))
    return CheckpointPart("", [layers])


def buffers(of: CheckpointPart) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in of.chunks[0].state_dict().items()}


@pytest.fixture(autouse=True)
def without_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests run without a model-parallel group, whose generators a snapshot has too."""
    monkeypatch.setattr(snapshot, "rng_state", lambda: {"tracker": {}})
    monkeypatch.setattr(snapshot, "restore_rng", lambda state: None)


def test_a_snapshot_fits_a_process_that_saw_sequences_of_other_lengths() -> None:
    taken = snapshot.capture([part(4096, 1.0)])
    fresh = part(50, 0.0)
    snapshot.restore([fresh], taken)
    assert buffers(fresh) == {"0.weight": [1.0] * 2, "0.expert_bias": [1.0] * 3}
    assert fresh.chunks[0][0].cos_cached.tolist() == [0.0] * 50


def test_a_snapshot_of_another_model_is_refused() -> None:
    taken = snapshot.capture([part(4, 1.0)])
    taken["parts"][0]["weights"]["model.0.expert_bias"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"expert_bias has shape \(5,\), not \(3,\)"):
        snapshot.restore([part(4, 0.0)], taken)
