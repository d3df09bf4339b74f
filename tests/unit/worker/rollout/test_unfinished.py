"""A sample from several attempts: tokens, log-probabilities, versions and what is generated again."""

import tracemalloc
from typing import Any

import pytest

from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.rollout.stream import (
    AbortedError,
    Chunk,
    EngineFailedError,
    RequestRefusedError,
    chunk_of,
)
from grpo_worker.rollout.unfinished import Unfinished

PARAMS: dict[str, Any] = {"max_new_tokens": 100, "stop_token_ids": [1]}


def _work(**params: Any) -> Unfinished:
    return Unfinished(Prompt(0, (7, 8)), 0, 11, PARAMS | params)


def _chunk(
    start: int, ids: list[int], version: int = 3, spans: list[tuple[int, int, int]] | None = None
) -> Chunk:
    meta: dict[str, Any] = {"weight_version": str(version)}
    if spans is not None:
        meta["weight_versions"] = [{"version": str(v), "start": s, "end": e} for v, s, e in spans]
    return Chunk(start, ids, [-float(token) for token in ids], spans is not None, meta)


def test_the_next_attempt_asks_for_the_rest() -> None:
    work = _work()
    assert work.request()["input_ids"] == [7, 8]
    assert work.take(_chunk(0, [20, 21, 22]), 3, 3) == 3
    work.cut()
    body = work.request()
    assert body["input_ids"] == [7, 8, 20, 21, 22]
    assert body["sampling_params"]["max_new_tokens"] == 97 and body["sampling_params"]["sampling_seed"] == 11
    work.take(_chunk(0, [23, 1], spans=[(3, 0, 2)]), 3, 3)
    sample = work.sample("e")
    assert tuple(sample.ids) == (20, 21, 22, 23, 1)
    assert tuple(sample.log_probs) == (-20, -21, -22, -23, -1)
    assert (sample.version, sample.spans) == (3, ())


def test_tokens_on_their_way_take_ten_bytes_each() -> None:
    """A step of 8,192 answers of 16 k tokens is held in flight: 1.3 GiB, not 10."""
    tokens = 16_384
    work = _work(max_new_tokens=tokens)
    work.request()
    tracemalloc.start()
    try:
        for start in range(0, tokens, 64):
            work.take(_chunk(start, [1000 + start + i for i in range(64)]), 3, 3)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert work.kept == tokens
    assert held < 10 * tokens


def test_a_chunk_that_cannot_be_kept_changes_nothing() -> None:
    """Ids and log-probabilities stay equally long, so that the next attempt can continue."""
    work = _work()
    work.request()
    work.take(_chunk(0, [20]), 3, 3)
    bad: Any = [0.5, None]
    with pytest.raises(TypeError):
        work.take(Chunk(1, [21, 22], bad, False, {"weight_version": "3"}), 3, 3)
    work.cut()
    assert work.request()["input_ids"] == [7, 8, 20]
    work.take(_chunk(0, [23, 1], spans=[(3, 0, 2)]), 3, 3)
    assert len(work.sample("e").log_probs) == work.kept == 3


def test_parts_that_overlap_add_each_token_once() -> None:
    work = _work()
    work.request()
    assert work.take(_chunk(0, [20, 21]), 3, 3) == 2
    assert work.take(_chunk(0, [20, 21, 22]), 3, 3) == 1
    assert work.take(_chunk(2, [22, 23]), 3, 3) == 1
    with pytest.raises(ValueError, match="goes from token 4 to token 6"):
        work.take(_chunk(6, [30]), 3, 3)
    assert work.kept == 4


def test_the_engines_own_spans_replace_what_was_noted_on_the_way() -> None:
    work = _work()
    work.request()
    work.take(_chunk(0, [20, 21], 3), 3, None)
    work.cut()
    work.request()
    work.take(_chunk(0, [22] * 4, 3), 3, None)
    work.take(_chunk(4, [23] * 4, 4), 3, None)
    work.take(_chunk(8, [1], 4, [(3, 0, 6), (4, 6, 9)]), 3, None)
    assert work.sample("e").spans == ((3, 8), (4, 11)) and work.sample("e").version == 3


def test_a_part_in_which_the_version_changed_is_generated_again() -> None:
    work = _work()
    work.request()
    work.take(_chunk(0, [20] * 4, 3), 3, None)
    work.take(_chunk(4, [21] * 4, 4), 3, None)
    work.cut()
    assert work.kept == 4 and work.request()["input_ids"] == [7, 8, 20, 20, 20, 20]


def test_tokens_of_another_version_discard_their_attempt_only() -> None:
    work = _work()
    work.request()
    work.take(_chunk(0, [20]), 3, 3)
    work.cut()
    work.request()
    work.take(_chunk(0, [21]), 3, 3)
    with pytest.raises(ValueError, match="sampled with version 4, expected 3"):
        work.take(_chunk(1, [22], 4), 3, 3)
    work.cut(trusted=False)
    assert work.kept == 1


def test_a_stop_text_across_the_cut_is_found() -> None:
    work = _work(stop=["####", "é"])
    work.request()
    work.take(_chunk(0, list(range(20, 30))), 3, 3)
    work.cut()
    assert work.kept == 6, "four bytes are at most four tokens"
    work.request()
    work.take(_chunk(0, [30, 31]), 3, 3)
    work.cut()
    assert work.kept == 6


def test_with_routed_experts_a_sample_starts_again() -> None:
    work = Unfinished(Prompt(0, (7, 8)), 0, 11, PARAMS, ExpertLayers(2, (1,), 2))
    assert work.request()["return_routed_experts"]
    work.take(_chunk(0, [20, 21]), 3, 3)
    work.cut()
    assert work.kept == 0 and work.request()["input_ids"] == [7, 8]


def test_an_answer_may_be_complete_although_its_stream_broke() -> None:
    work = _work(max_new_tokens=3)
    work.request()
    work.take(_chunk(0, [20, 21]), 3, 3)
    assert not work.complete
    work.take(_chunk(2, [22]), 3, 3)
    assert work.complete
    ended = _work()
    ended.request()
    ended.take(_chunk(0, [20, 1]), 3, 3)
    assert ended.complete and tuple(ended.sample("e").ids) == (20, 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"error": {"message": "too long", "code": 400}}, RequestRefusedError),
        ({"error": {"message": "crashed", "code": 500}}, EngineFailedError),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "long", "status_code": 400}}},
         RequestRefusedError),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "bad", "status_code": 500}}},
         EngineFailedError),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "full", "status_code": 503}}},
         AbortedError),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "paused"}}}, AbortedError),
    ],
)  # fmt: skip
def test_answers_that_the_engine_gives_up(answer: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        chunk_of(answer)
