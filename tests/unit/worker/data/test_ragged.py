"""Ragged batches are padded batches without the padding: bitwise, for any lengths."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_worker.algorithms.batch_advantages import add_advantages
from grpo_worker.algorithms.losses import row_weights
from grpo_worker.common.ragged_batch import RaggedBatch, joined
from grpo_worker.data.micro_batch import MicroBatch, Shape, groups_for, padded, split
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch
from support import padded_reference as reference
from support.objects import job, spec_of

N = 2
CPU = torch.device("cpu")
lengths_strategy = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=12)


def _rollouts(lengths: list[tuple[int, int]]) -> tuple[list[Prompt], list[Sample]]:
    """Return prompts and answers of these numbers of tokens."""
    generator = np.random.default_rng(len(lengths))
    prompts, samples = [], []
    for index, (before, after) in enumerate(lengths):
        prompts.append(Prompt(index, tuple(generator.integers(0, 99, before).tolist())))
        ids, log_probs = generator.integers(0, 99, after).tolist(), (-generator.random(after)).tolist()
        samples.append(Sample(index, 0, tuple(ids), tuple(log_probs), 1, "e"))
    return prompts, samples


def _both(lengths: list[tuple[int, int]]) -> tuple[RaggedBatch, Any]:
    """Return a batch with every kind of column: ragged and padded."""
    prompts, samples = _rollouts(lengths)
    batch, whole = make_batch(prompts, samples), reference.make_batch(prompts, samples, pad_id=0)
    mask = whole["response_mask"]
    whole["weights"] = reference.token_weights(mask, "seq-mean-token-mean", 16)
    whole["old_log_probs"] = torch.sin(torch.arange(mask.numel()).reshape(mask.shape) + 1.0) * mask
    weights = row_weights(torch.from_numpy(batch.response_lengths), "seq-mean-token-mean", 16)
    old = whole["old_log_probs"][mask.bool()].numpy()
    assert np.array_equal(batch.lengths, whole["attention_mask"].sum(1)), "the mask follows from the lengths"
    del whole["attention_mask"]
    return batch.with_columns(old_log_probs=old).with_rows(weights=weights.numpy()), whole


@given(lengths=lengths_strategy)
def test_padding_gives_the_columns_of_a_padded_batch(lengths: list[tuple[int, int]]) -> None:
    batch, whole = _both(lengths)
    assert batch.input_ids is not None and batch.input_ids.dtype == np.int32
    found = padded(batch, range(batch.rows))
    for name, column in whole.items():
        assert found[name].dtype == column.dtype and torch.equal(found[name], column), name
    assert batch.nbytes <= 4 * (batch.tokens + 2 * int(batch.response_lengths.sum()) + 4 * batch.rows)


@given(lengths=lengths_strategy, rows=st.integers(1, 4), multiple=st.sampled_from([1, 2, 8]))
def test_padded_micro_batches_are_bitwise_those_of_a_padded_batch(
    lengths: list[tuple[int, int]], rows: int, multiple: int
) -> None:
    batch, whole = _both(lengths)
    shape = Shape(rows, multiple)
    found = split(batch, shape, CPU)
    expected = list(reference.split(_masked(batch, whole), shape))
    _assert_equal(found, expected)
    assert all(micro.input_ids.shape == found.size for micro in found)


@given(
    lengths=lengths_strategy,
    count=st.integers(1, 5),
    multiple=st.sampled_from([1, 2, 8]),
)
def test_packed_micro_batches_are_bitwise_those_of_a_padded_batch(
    lengths: list[tuple[int, int]], count: int, multiple: int
) -> None:
    batch, whole = _both(lengths)
    groups = groups_for(batch.lengths.tolist(), count)  # some are empty
    shape = Shape(None, multiple)
    found = split(batch, shape, CPU, groups)
    _assert_equal(found, list(reference.split(_masked(batch, whole), shape, groups)))


def _masked(batch: RaggedBatch, whole: Any) -> dict[str, torch.Tensor]:
    """Return the padded batch with the mask from which its micro-batches take the lengths."""
    seen = torch.arange(batch.width) < torch.from_numpy(batch.lengths)[:, None]
    return dict(whole.items()) | {"attention_mask": seen}


def _assert_equal(found: Any, expected: list[MicroBatch]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.indices, ours.lengths, ours.bounds) == (theirs.indices, theirs.lengths, theirs.bounds)
        assert ours.columns.keys() == theirs.columns.keys() - {"attention_mask"}
        for name, column in ours.columns.items():
            assert torch.equal(theirs.columns[name], column), name


@given(lengths=lengths_strategy, data=st.data())
def test_rows_that_are_taken_and_joined_are_the_batch(lengths: list[tuple[int, int]], data: Any) -> None:
    batch, whole = _both(lengths)
    cut = data.draw(st.integers(0, batch.rows))
    pieces = [_take(batch, list(rows)) for rows in (range(cut), range(cut, batch.rows)) if len(rows)]
    again = padded(joined(pieces), range(batch.rows))
    assert all(torch.equal(again[name], column) for name, column in whole.items())
    order = data.draw(st.permutations(range(batch.rows)))
    assert torch.equal(padded(batch, order)["input_ids"], whole["input_ids"][order])


def _take(batch: RaggedBatch, rows: list[int]) -> RaggedBatch:
    return RaggedBatch(
        batch.prompt_lengths[rows],
        batch.lengths[rows],
        batch.width,
        batch.take_column("input_ids", rows),
        {name: batch.take_column(name, rows) for name in batch.response},
        {name: batch.take_column(name, rows) for name in batch.row},
    )


def test_a_column_of_another_size_is_named() -> None:
    batch, _ = _both([(2, 3)])
    with pytest.raises(ValueError, match="column values has 2 entries, its rows have 3"):
        batch.with_columns(values=np.zeros(2))


SPECS: dict[str, dict[str, Any]] = {
    "grpo": {"advEstimator": "grpo"},
    "grpo-kl": {"advEstimator": "grpo", "useKlInReward": True, "klLossType": "k1"},
    "rloo-overlong": {"advEstimator": "rloo", "overlong": {"bufferLength": 2, "penalty": 1.0}},
    "baseline": {"advEstimator": "reinforce_plus_plus_baseline"},
    "reinforce": {"advEstimator": "reinforce_plus_plus", "gamma": 0.9, "useKlInReward": True},
    "gae": {"advEstimator": "gae", "gamma": 0.9, "critic": {"lam": 0.9}},
    "correction": {"advEstimator": "grpo", "rolloutCorrection": {"tisCap": 2.0}},
}


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=20)
@given(lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=2, max_size=8))
def test_advantages_are_those_of_a_padded_batch(name: str, lengths: list[tuple[int, int]]) -> None:
    lengths = lengths[: len(lengths) // N * N]
    batch, whole = _both(lengths)
    spec = spec_of(job(algorithm={"samplesPerPrompt": N} | SPECS[name]))
    inside = whole["response_mask"].bool()
    generator = torch.Generator().manual_seed(1)
    for column in ("ref_log_prob", "values"):
        whole[column] = torch.rand(inside.shape, generator=generator) * inside
        batch = batch.with_columns(**{column: whole[column][inside].numpy()})
    scores = torch.rand(batch.rows, generator=generator).tolist()
    found, metrics = add_advantages(batch, scores, spec, 0.1)
    expected = reference.add_advantages(whole, scores, spec, 0.1)
    columns = padded(found, range(batch.rows))
    for column in ("advantages", "returns", "rollout_is_weights"):
        if column in whole.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            same: Callable[..., bool] = torch.equal if name in ("grpo", "correction") else torch.allclose
            assert same(columns[column], whole[column]), column
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
