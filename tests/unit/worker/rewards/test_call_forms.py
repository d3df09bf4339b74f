"""Reward functions written for verl, TRL and verifiers run unchanged."""

from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import Record
from grpo_worker.rewards.call_forms import fields_of, form_of
from grpo_worker.rewards.verifiers import FunctionVerifier, Item, RewardError

CHAT = [{"role": "user", "content": "1 + 1?"}]
ANSWER = [{"role": "assistant", "content": "2"}]


def check(tmp_path: Path, code: str, prompt: Any = "1 + 1?", on_failure: str = "stop") -> float:
    """Return the score of the answer "2" by the function ``f`` in ``code``."""
    file = tmp_path / "reward.py"
    file.write_text(code)
    spec = RewardSpec(function=f"{file}:f", workers=1, timeout_seconds=20, on_failure=on_failure)
    record = Record("sums", "2", {"index": 0}, prompt, {"level": 3, "answer": "two"})
    judge = FunctionVerifier(spec)
    judge.check(Item(0, "2", record, (7, 8), 5))
    return judge.score([Item(0, "2", record, (7, 8), 5)])[0]


@pytest.mark.parametrize(
    "code",
    [
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    given = [data_source, solution_str, ground_truth, extra_info]\n"
        "    return given == ['sums', '2', '2', {'index': 0}]",
        "def f(ground_truth, solution_str): return solution_str == ground_truth",
        "def f(solution_str, strict=True, **kwargs):\n"
        "    return strict and sorted(kwargs) == ['data_source', 'extra_info', 'ground_truth']",
        "def f(**kwargs): return {'score': kwargs['solution_str'] == '2', 'why': 'equal'}",
        "async def f(solution_str, ground_truth): return float(solution_str == ground_truth)",
        "import numpy\ndef f(solution_str): return numpy.float32(1)",
    ],
)
def test_verls_form(tmp_path: Path, code: str) -> None:
    assert check(tmp_path, code) == 1.0


@pytest.mark.parametrize(
    ("code", "prompt"),
    [
        ("def f(completions, **kwargs): return [float(c == '2') for c in completions]", "1 + 1?"),
        (
            "def f(prompts, completions, level, answer, **_):\n"
            "    return [float((prompts, completions, level, answer) == (['1 + 1?'], ['2'], [3], ['two']))]",
            "1 + 1?",
        ),
        ("def f(completions, ground_truth): return [float(ground_truth == completions)]", "1 + 1?"),
        (f"def f(prompts, completions): return [(prompts, completions) == ([{CHAT}], [{ANSWER}])]", CHAT),
        ("async def f(completions, **_): return [1.0]", CHAT),
        ("def f(completion_ids, **_): return [float(completion_ids == [[7, 8]])]", CHAT),
        ("def f(completions, trainer_state): return [float(trainer_state.global_step == 5)]", CHAT),
        (
            "def f(completions, **kwargs):\n"
            "    names = {'answer', 'completion_ids', 'data_source', 'extra_info', 'ground_truth', 'level',\n"
            "             'prompts', 'trainer_state'}\n"
            "    return [float(kwargs.keys() == names and kwargs['answer'] == ['two'])]",
            CHAT,
        ),
        ("import numpy\ndef f(completions): return numpy.ones(1)", CHAT),
    ],
)
def test_trls_form(tmp_path: Path, code: str, prompt: Any) -> None:
    assert check(tmp_path, code, prompt) == 1.0


@pytest.mark.parametrize(
    ("code", "prompt"),
    [
        ("def f(completion, answer): return completion == answer", "1 + 1?"),
        ("async def f(completion, answer, **_): return completion[-1]['content'] == answer", CHAT),
        ("def f(parser, completion, answer): return parser.parse_answer(completion) == answer", CHAT),
        ("def f(parser, completion, answer): return parser.parse_answer(completion) == answer", "1 + 1?"),
        ("def f(state): return state['completion'] == state['answer'] and state['task'] == 'sums'", "1 + 1?"),
        (
            "def f(task, info): return (task, info['index']) == ('sums', 0)",
            "1 + 1?",
        ),
    ],
)
def test_verifiers_form(tmp_path: Path, code: str, prompt: Any) -> None:
    assert check(tmp_path, code, prompt) == 1.0


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def f(question): return 1", r"f has parameter 'question', which is not in any form\. .*verl: data"),
        (
            "\ndef f(solution_str, completion): return 1",
            r"py:2: .*'completion', .* in the form of verl\.",
        ),
        (
            "def f(completions, difficulty): return [1]",
            r"'difficulty', .* the form of TRL \(columns of the row: level, answer\)",
        ),
        ("def f(completion, judge): return 1", r"'judge', .* not in the form of verifiers\."),
        ("def f(solution_str, /): return 1", "'solution_str' is positional-only: remove"),
        ("\n\ndef f(solution_str): return 'good'", r"reward\.py:3: returned 'good' \(str\): return a number"),
        ("def f(solution_str): pass", r"returned None \(NoneType\): return a number"),
        ("def f(solution_str): return {'reward': 1}", "returned a dict with reward: return a number"),
        ("def f(completions): return 1.0", r"returned 1\.0 \(float\) for one completion: return a list"),
        ("def f(completions): return [1, 2]", r"returned \[1, 2\] \(list\) for one completion"),
        (
            "def f(completions): return [None]",
            r"returned \[None\], but no other function judges the row: return a number",
        ),
        (
            "def f(completions, trainer_state): return [trainer_state.epoch]",
            r"py:1: AttributeError: trainer_state has no 'epoch' here: use trainer_state\.global_step",
        ),
        (
            "def g(x):\n    return x['x']\ndef f(solution_str):\n    return g({})",
            r"reward\.py:2: KeyError: 'x'",
        ),
        (
            "import json\nasync def f(completion):\n    return json.loads('')",
            r"reward\.py:3: JSONDecodeError",
        ),
    ],
)
def test_a_wrong_signature_is_named_with_its_line(tmp_path: Path, code: str, problem: str) -> None:
    with pytest.raises(RewardError, match=rf"^spec\.reward\.function=/.*reward\.py:f: .*{problem}"):
        check(tmp_path, code, on_failure="zero")


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("lambda solution_str, ground_truth: 1", ["ground_truth", "solution_str"]),
        ("lambda **kwargs: 1", ["data_source", "extra_info", "ground_truth", "solution_str"]),
        ("lambda completions: [1]", ["columns", "prompt", "solution_str"]),
        ("lambda completions, completion_ids: [1]", ["columns", "completion_ids", "prompt", "solution_str"]),
        ("lambda completion, answer: 1", ["ground_truth", "prompt", "solution_str"]),
    ],
)
def test_a_function_receives_only_its_parameters(code: str, fields: list[str]) -> None:
    function = eval(code)
    assert fields_of(function, form_of(function)) == fields


def test_unused_fields_are_not_sent(tmp_path: Path) -> None:
    class Unsendable:
        def __str__(self) -> str:
            raise AssertionError("sent")

    file = tmp_path / "reward.py"
    file.write_text("def f(solution_str, ground_truth): return solution_str == ground_truth")
    judge = FunctionVerifier(RewardSpec(function=f"{file}:f", workers=1, timeout_seconds=20))
    record = Record("sums", "2", {"tests": Unsendable()}, Unsendable(), {"row": Unsendable()})
    assert judge.score([Item(0, "2", record)]) == [1.0]
