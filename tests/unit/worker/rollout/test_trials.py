"""Trials of suspected prompts: one at a time on an engine, and each on one engine."""

from grpo_worker.rollout.trials import Trials

ENGINES = ["a", "b", "c"]


def test_an_engine_tries_one_prompt_and_a_prompt_is_tried_on_one_engine() -> None:
    trials = Trials()
    assert trials.allowed(1, ENGINES) == ENGINES
    trials.begin("a", 1)
    trials.begin("a", 1)
    assert trials.allowed(1, ENGINES) == ["a"] and trials.allowed(2, ENGINES) == ["b", "c"]
    trials.begin("b", 2)
    assert trials.allowed(3, ["a", "b"]) == [], "it waits"
    trials.end("a")
    assert trials.allowed(3, ENGINES) == ["c"]
    trials.end("a")
    assert trials.allowed(3, ENGINES) == ["a", "c"] and trials.allowed(1, ENGINES) == ["a", "c"]
