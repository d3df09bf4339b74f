"""Sampling parameters."""

from typing import Any

import pytest
import torch

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_worker.rollout.sampling import sampling_params
from grpo_worker.rollout.sglang.sampling_plugin import _min_p_first


def test_defaults_send_no_optional_parameter() -> None:
    params = sampling_params(AlgorithmSpec(), 64, (5, 3))
    assert params == {"max_new_tokens": 64, "temperature": 1.0, "stop_token_ids": [5, 3]}


def test_filters_and_stop_strings_are_sent() -> None:
    spec = AlgorithmSpec(top_p=0.9, top_k=20, min_p=0.05, stop=["####"], temperature=0.7)
    params = sampling_params(spec, 64, (5,))
    assert (params["top_p"], params["top_k"], params["min_p"]) == (0.9, 20, 0.05)
    assert params["stop"] == ["####"] and params["no_stop_trim"], "sampled tokens stay in the answer"


def test_min_p_beside_a_seed_is_applied_beforehand() -> None:
    seen: dict[str, Any] = {}

    def original(probs: torch.Tensor, *_: Any, **__: Any) -> None:
        seen.update(probs=probs, need=_[3])

    probs = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]])
    min_ps, seed = torch.tensor([0.4, 0.9]), torch.tensor([1, 2])
    _min_p_first(original, probs, None, None, min_ps, True, seed, None)
    assert seen["need"] is False
    assert seen["probs"].tolist() == [[pytest.approx(0.6), pytest.approx(0.3), 0], [pytest.approx(0.4), 0, 0]]
    _min_p_first(original, probs, None, None, min_ps, True, None, None)
    assert seen["need"] is True and seen["probs"] is probs, "without a seed SGLang does it"
