"""Placement: room as engines report it, ranks of attention data parallelism, prompts that stay together."""

import pytest

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.engine_load import RankLoad, rank_loads
from grpo_worker.rollout.placement import Place, Placement
from grpo_worker.rollout.unfinished import Unfinished

LOAD = {
    "dp_rank": 0,
    "num_running_reqs": 3,
    "num_waiting_reqs": 1,
    "num_used_tokens": 700,
    "max_total_num_tokens": 1000,
    "max_running_requests": 64,
}


def _placed(placement: Placement, prompt: int, count: int, *engines: str) -> list[Place | None]:
    return [placement.place(engines, prompt, 10) for _ in range(count)]


def test_each_rank_is_filled_to_its_own_limit_and_a_small_queue() -> None:
    placement = Placement(RankLoad())
    placement.report("e", [RankLoad(max_running=64)] * 4)
    places = [place for prompt in range(20) for place in _placed(placement, prompt, 16, "e")]
    ranks = [place.rank for place in places if place is not None]
    assert [ranks.count(rank) for rank in range(4)] == [66] * 4, "64 and a queue of 2"
    assert len(ranks) == 264


def test_the_samples_of_a_prompt_share_a_rank_until_it_is_full() -> None:
    placement = Placement(RankLoad())
    for engine in "ab":
        placement.report(engine, [RankLoad(max_running=20)] * 2)
    first = _placed(placement, 0, 16, "a", "b")
    second = _placed(placement, 1, 16, "a", "b")
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    third = _placed(placement, 0, 8, "a", "b")
    assert third[:4] == [first[0]] * 4 and first[0] not in third[4:]


def test_an_engine_that_makes_requests_wait_is_full() -> None:
    placement = Placement(RankLoad())
    placement.report("e", [RankLoad(max_running=64)])
    assert None not in _placed(placement, 0, 40, "e")
    placement.report("e", [RankLoad(running=30, waiting=10, max_running=64)])
    assert placement.place(["e"], 1, 10) is None
    placement.report("e", [RankLoad(running=40, waiting=0, max_running=64)])
    assert placement.place(["e"], 1, 10) is not None


def test_new_prompts_fit_into_the_kv_cache() -> None:
    placement = Placement(RankLoad())
    placement.report("e", [RankLoad(used_tokens=900, max_tokens=1000, max_running=64)])
    assert [place is not None for place in _placed(placement, 0, 12, "e")] == [True] * 10 + [False] * 2


def test_an_engine_to_avoid_is_used_when_there_is_no_other() -> None:
    placement = Placement(RankLoad(max_running=8))
    first = placement.place(["a", "b"], 0, 10)
    assert first is not None
    second = placement.place(["a", "b"], 0, 10, {first.engine})
    assert second is not None and second.engine != first.engine
    third = placement.place([first.engine], 0, 10, {first.engine})
    assert third is not None and third.engine == first.engine


def test_a_place_that_was_given_back_is_free() -> None:
    placement = Placement(RankLoad(max_running=1))
    one, two = placement.place(["e"], 0, 10), placement.place(["e"], 0, 10)
    assert one is not None and two is not None and placement.place(["e"], 0, 10) is None
    placement.release(one)
    assert placement.place(["e"], 0, 10) is not None


def test_a_request_names_its_rank_only_if_there_are_several() -> None:
    work = Unfinished(Prompt(0, (1,)), 0, 0, {"max_new_tokens": 2, "stop_token_ids": []})
    assert "routed_dp_rank" not in work.request() and work.request(3)["routed_dp_rank"] == 3


def test_reports_are_read_in_the_order_of_the_ranks() -> None:
    loads = rank_loads({"loads": [LOAD | {"dp_rank": 1, "num_running_reqs": 5}, LOAD]})
    assert loads[0] == RankLoad(3, 1, 700, 1000, 64) and loads[1].running == 5


@pytest.mark.parametrize("answer", [{}, {"loads": []}, {"loads": [{"dp_rank": 0}]}, {"loads": None}])
def test_other_answers_are_refused(answer: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="/v1/loads"):
        rank_loads(answer)
