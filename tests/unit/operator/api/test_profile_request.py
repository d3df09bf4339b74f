"""The grammar of the annotation that requests a profile."""

import pytest

from grpo_operator.api.v1alpha1.profile_request import ProfileRequest, parse_request

ACCEPTED = {
    "torch": {"tool": "torch", "target": "trainer"},
    "engines": {"tool": "torch", "target": "engines"},
    "nsight": {"tool": "nsight", "target": "trainer"},
    "py-spy": {"tool": "py-spy", "target": "trainer"},
    "torch trainer ranks=0,3 steps=2": {"tool": "torch", "target": "trainer", "ranks": [0, 3], "steps": 2},
    "torch engines engines=a-0,a-1": {"tool": "torch", "target": "engines", "engines": ["a-0", "a-1"]},
    "py-spy controller seconds=10": {"tool": "py-spy", "target": "controller", "seconds": 10},
    '{"tool":"torch","target":"trainer","ranks":[0],"steps":2}': {
        "tool": "torch",
        "target": "trainer",
        "ranks": [0],
        "steps": 2,
    },
}
REFUSED = {
    "": "the value is empty: write TOOL",
    "perf": "'perf' is no tool and no target: write TOOL",
    "torch nsight": "gives tool twice",
    "torch controller": "tool torch has no target controller: use trainer or engines",
    "py-spy engines": "tool py-spy has no target engines: use trainer or controller",
    "nsight engines": "tool nsight has no target engines: use trainer",
    "torch steps=two": r"rl.grpo.dev/profile.steps: .*valid integer.* \(got 'two'\)",
    "torch steps=0": r"rl.grpo.dev/profile.steps: .*greater than or equal to 1 \(got '0'\)",
    "torch ranks=": "rl.grpo.dev/profile.ranks.0: .*valid integer",
    "torch depth=1": "rl.grpo.dev/profile.depth: Extra inputs",
    "torch seconds=3": "use steps instead of seconds",
    "py-spy steps=3": "use seconds instead of steps",
    "py-spy controller ranks=0": "ranks needs target trainer, not controller: remove it",
    "torch engines=a": "engines needs target engines, not trainer: remove it",
    '{"tool":': "is no JSON object",
    "torch " * 200: "more than 1024 characters",
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_short_form_and_json_give_the_same_requests(text: str) -> None:
    assert parse_request(text).wire() == ACCEPTED[text]


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]):
        parse_request(text)


def test_a_trace_is_short_where_the_request_sets_no_length() -> None:
    assert ProfileRequest().traced_steps == 1
    assert parse_request("engines").traced_steps == 10
    assert parse_request("torch ranks=3,1,3").of_ranks == (1, 3)
