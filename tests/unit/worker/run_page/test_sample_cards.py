"""Choice of the samples on a page, and the parts of them that it shows."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.sample_cards import answer_card, cut, within
from grpo_worker.run_page.sample_choice import Group, groups, overview, ranked_answers, spread_out, telling
from grpo_worker.run_page.token_texts import token_texts
from support.run_pages import TOKENIZER


def _group(prompt: int, *scores: float, gap: float = 0.0) -> Group:
    return Group(prompt, len(scores), scores, gap)


def test_groups_have_the_scores_of_their_answers() -> None:
    found = groups([5, 5, 7, 5, 9], [1.0, 0.0, None, 0.5, None], [0.1, None, 0.3, 0.2, None])
    assert [group.row() for group in found] == [
        [5, 3, 0.0, 0.5, 1.0, 0.2],
        [7, 1, None, None, None, 0.3],
        [9, 1, None, None, None, 0.0],
    ]


def test_the_groups_that_say_most_come_first() -> None:
    found = [
        _group(0, 0.5),
        _group(1, 1.0, 1.0),
        _group(2, 0.0, 0.0),
        _group(3, 0.0, 1.0),
        _group(4, 0.5, gap=2),
    ]
    assert [group.prompt for group in telling(found, 9)] == [3, 1, 2, 4, 0]
    assert [group.prompt for group in telling(found, 2)] == [3, 1]
    assert [group.prompt for group in telling([_group(6), _group(7)], 9)] == [6, 7]
    assert telling([], 3) == []


@given(st.lists(st.integers(), unique=True).map(sorted), st.integers(2, 9))
def test_values_at_equal_distances_have_both_ends(values: list[int], most: int) -> None:
    found = spread_out(values, most)
    assert len(found) == min(len(values), most) and found == sorted(set(found))
    assert not values or (found[0], found[-1]) == (values[0], values[-1])


def test_the_overview_and_the_answers_are_ranked_by_score() -> None:
    found = [_group(prompt, float(prompt % 4)) for prompt in range(8)] + [_group(8)]
    assert [group.prompt for group in overview(found, 3)] == [8, 5, 7]
    assert ranked_answers([0.1, None, 0.9, 0.5], 9) == [2, 3, 0, 1]
    assert ranked_answers([0.1, None, 0.9, 0.5], 2) == [2, 1]


def _row(tokens: int, text: str = "") -> dict[str, Any]:
    return {
        "uid": "3.1", "score": 1.0, "verifier_score": 1.0, "advantage": float("nan"), "dropped": None,
        "version": 6, "engine": "engine-0", "log_prob_gap_mean": 0.25,
        "spans": [{"version": 6, "end": tokens}],
        "answer": text, "answer_ids": list(range(tokens)), "prompt_index": 3, "prompt": "why?",
        "old_log_probs": [-0.123456] * tokens, "rollout_log_probs": None,
    }  # fmt: skip


def test_a_long_answer_has_its_beginning_and_its_end() -> None:
    limits = Limits(tokens=4, characters=10)
    card = answer_card(_row(9, "0123456789abcdef"), None, limits)
    assert card["tokens"] == {
        "first": 2, "pieces": ["0", "1", "7", "8"], "trainer": [-0.1235] * 4, "engine": [None] * 4
    }  # fmt: skip
    assert card["length"] == 9 and card["text"] == "01234\n… 6 characters are left out …\nbcdef"
    assert card["advantage"] is None, "JSON has no NaN"
    whole = answer_card(_row(4, "short"), None, limits)
    assert whole["tokens"]["first"] == 4 and whole["text"] == "short"


def test_an_answer_has_the_parts_of_its_reward_unless_its_file_is_older() -> None:
    row = _row(2) | {"reward_parts": {"format": 0.5, "length": float("inf")}}
    assert answer_card(row, None, Limits())["parts"] == {"format": 0.5, "length": None}
    for old in (_row(2), _row(2) | {"reward_parts": None}):
        assert answer_card(old, None, Limits())["parts"] == {}


def test_a_refused_prompt_has_no_tokens() -> None:
    row = _row(0) | {"uid": None, "answer": None, "answer_ids": None, "spans": None, "dropped": "too long"}
    assert answer_card(row, TOKENIZER.decode_all, Limits())["tokens"]["pieces"] == []


def test_a_text_that_fits_is_left_as_it_is() -> None:
    assert cut("x" * 10, 10) == "x" * 10


def test_groups_that_say_least_are_left_out_when_samples_are_too_large() -> None:
    steps = [{"shown": [{"prompt": at, "text": "x" * 100} for at in range(count)]} for count in (4, 2)]
    assert within(steps, 400) == 3
    assert [[group["prompt"] for group in step["shown"]] for step in steps] == [[0], [0, 1]]
    assert len(json.dumps(steps)) < 500
    assert within(steps, 1 << 20) == 0


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_texts_of_tokens_are_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    texts = token_texts(ids, TOKENIZER.decode_all)
    assert len(texts) == len(ids) and "".join(texts) == TOKENIZER.decode_all([ids])[0]


def test_a_space_that_a_tokenizer_leaves_out_at_the_beginning_is_kept() -> None:
    def decode(rows: Sequence[Sequence[int]]) -> list[str]:
        words = {1: " so", 2: " it", 3: "s"}
        return ["".join(words[token] for token in row).removeprefix(" ") for row in rows]

    assert token_texts([1, 2, 3, 1], decode) == ["so", " it", "s", " so"]
