"""Every request is sampled by its own seed, also without deterministic kernels."""

from types import SimpleNamespace
from typing import Any

import torch

from grpo_worker.rollout.sglang import sampling_plugin


def _info(batch: Any, seeds: torch.Tensor | None) -> Any:
    def original(*_arguments: Any) -> Any:
        return SimpleNamespace(sampling_seed=seeds, temperatures=torch.ones(len(batch.reqs), 1))

    return sampling_plugin._with_seeds(original, "class", batch, 128)


def _batch(*seeds: int | None) -> Any:
    return SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    )


def test_requests_keep_their_seeds_without_deterministic_kernels() -> None:
    seeds = _info(_batch(7, None, 9), None).sampling_seed
    assert seeds.dtype == torch.int64 and seeds.tolist() == [7, 42, 9]


def test_seeds_of_a_deterministic_engine_are_left_alone() -> None:
    own = torch.tensor([1, 2])
    assert _info(_batch(7, 8), own).sampling_seed is own
