"""The groups of a batch follow from the prompts' order and scores, not from the order of arrival."""

import random

import pytest

from grpo_worker.controller.generation.batch_selection import BatchSelection
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import PromptRefusedError, Sample, UnfitEngineError

SIZE = 8


def _chosen(
    seed: int, useful: list[bool], refused: frozenset[int] = frozenset(), most: int = 1000, refusals: int = 8
) -> RolloutBatch:
    """Run a selection in which groups arrive in an order of this seed."""
    arrival, selection = random.Random(seed), BatchSelection(SIZE, most, True, refusals)
    under_way: list[Prompt] = []
    drawn = 0
    while not selection.complete:
        fresh = [Prompt(index, (1,)) for index in range(drawn, drawn + selection.missing)]
        drawn += len(fresh)
        selection.start(fresh)
        under_way += fresh
        prompt = under_way.pop(arrival.randrange(len(under_way)))
        if prompt.index in refused:
            selection.refuse(PromptRefusedError(prompt, f"engine-0 refuses {prompt.index}"))
            continue
        samples = [Sample(prompt.index, k, (5,), (-0.1,), 1, "e") for k in range(2)]
        selection.add(prompt, samples, [0.0, float(useful[prompt.index])])
    return selection.batch()


@pytest.mark.parametrize("case", range(20))
def test_the_batch_is_the_same_for_every_order_of_arrival(case: int) -> None:
    draw = random.Random(1000 + case)
    useful = [draw.random() < 0.4 for _ in range(400)]
    refused = frozenset(index for index in range(400) if draw.random() < 0.02)
    batches = [_chosen(seed, useful, refused) for seed in range(10)]
    assert all(batch == batches[0] for batch in batches)
    first = [index for index in range(400) if useful[index] and index not in refused][:SIZE]
    assert [p.index for p in batches[0].prompts] == first
    assert [p.index for p in batches[0].taken] == list(range(first[-1] + 1)), "not one prompt too many"
    used = {s.prompt_index for s in (*batches[0].samples, *batches[0].left_out)} | set(batches[0].refused)
    assert used == {p.index for p in batches[0].taken}, "nothing is lost"


def test_at_the_limit_useless_groups_fill_the_batch() -> None:
    batches = [_chosen(seed, [index == 5 for index in range(50)], most=2 * SIZE) for seed in range(10)]
    assert all(batch == batches[0] for batch in batches)
    assert [p.index for p in batches[0].prompts] == [5, 0, 1, 2, 3, 4, 6, 7]
    assert len(batches[0].taken) == 2 * SIZE


def test_a_refused_prompt_is_replaced_by_the_next() -> None:
    batch = _chosen(0, [True] * 50, frozenset({2, 3}))
    assert [p.index for p in batch.prompts] == [0, 1, 4, 5, 6, 7, 8, 9]
    assert batch.refused == {2: "engine-0 refuses 2", 3: "engine-0 refuses 3"} and batch.left_out == []


def test_too_many_refusals_end_the_job_with_their_words() -> None:
    with pytest.raises(UnfitEngineError, match=r"engine-0 refuses \d+; 3 .* data.maxRefusedShare allows 2"):
        _chosen(0, [True] * 50, frozenset(range(50)), refusals=2)


def test_with_spare_prompts_the_first_groups_form_the_batch_and_the_rest_is_cut() -> None:
    selection = BatchSelection(2, 2, False, 1, spare=2)
    prompts = [Prompt(index, (1,)) for index in range(4)]
    assert selection.missing == 4
    selection.start(prompts)
    for index in (3, 1):
        assert not selection.complete
        selection.add(prompts[index], [Sample(index, 0, (5,), (-0.1,), 1, "e")], [0.0])
    assert selection.complete and selection.missing == 0
    batch = selection.batch()
    assert [p.index for p in batch.prompts] == [p.index for p in batch.taken] == [1, 3]
    assert [p.index for p in selection.cut()] == [0, 2]


def test_a_step_waits_for_the_prompts_that_were_cut_before() -> None:
    selection = BatchSelection(2, 2, False, 1, spare=2, awaited=frozenset({0}))
    prompts = [Prompt(index, (1,)) for index in range(4)]
    selection.start(prompts)
    for index in (3, 2, 1):
        selection.add(prompts[index], [Sample(index, 0, (5,), (-0.1,), 1, "e")], [0.0])
        assert not selection.complete
    selection.add(prompts[0], [Sample(0, 0, (5,), (-0.1,), 1, "e")], [0.0])
    assert selection.complete and [p.index for p in selection.batch().prompts] == [0, 3]
    assert [p.index for p in selection.cut()] == [1, 2]
