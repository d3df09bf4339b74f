"""The built-in verifiers: expected scores, and no failure for any answer."""

import json
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import Record
from grpo_worker.rewards.verifiers import FunctionVerifier, Item, RewardError


@pytest.fixture(scope="module")
def judges() -> dict[str, FunctionVerifier]:
    def judge(name: str) -> FunctionVerifier:
        return FunctionVerifier(RewardSpec(builtin=name, workers=1, timeout_seconds=20, on_failure="stop"))

    return {name: judge(name) for name in ("math", "code", "json", "choice")}


def score(judge: FunctionVerifier, answer: str, ground_truth: Any) -> float:
    return judge.score([Item(0, answer, Record("mine", ground_truth, {}))])[0]


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("24 + 48 = 72\n#### 72", "72", True),
        ("#### 1,000", "1000", True),
        ("#### 72\nLet me check: 3 + 4 = 7", "72", True),
        ("The answer is \\boxed{\\frac{1}{2}}.", "0.5", True),
        ("#### 0.5", "\\frac{1}{2}", True),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
        ("<think>\\boxed{71}?</think> \\boxed{72}", "72", True),
        ("\\boxed{72} or \\boxed{71}", "72", False),
        ("So it is 72", "He sold 24+48=<<24+48=72>>72\n#### 72", True),
        ("\\boxed{18}", "Thus the total is $\\boxed{18}$ dollars", True),
        ("#### 71", "72", False),
        ("no idea", "72", False),
        ("", "72", False),
        ("\\boxed{9^{9^{9^{9^{9}}}}}", "72", False),
        ("#### 72", 72, True),
        ("The answer is \\boxed{42}\n\n#### Verification\nIt checks.", "42", True),
        ("#### Conclusion\nThe answer is 42.", "42", True),
        ("#### Final answer:\n$42$", "42", True),
        ("#### Step 1: add\n40 + 2\n#### Step 2\nSo it is \\boxed{42}.\n#### 1. Check\nFine.", "42", True),
        ("#### 1. Add\nThe answer is 42", "42", True),
        ("<think>\\boxed{41}</think>\n#### 42", "42", True),
        ("#### 42 dollars\nThat is 6 times 7", "42", True),
        ("##### 42\n#### $\\frac{1}{2}$\nfrom 3 of 6", "0.5", True),
        ("\\boxed{42}", "#### Answer\nIt is 42", True),
    ],
)
def test_math(judges: dict[str, FunctionVerifier], answer: str, truth: Any, right: bool) -> None:
    assert score(judges["math"], answer, truth) == float(right)


SUM = "Like this:\n```python\na, b = map(int, input().split())\nprint(a {op} b)\n```\nDone."
SUMS = {"inputs": ["1 2\n", "2 2\n", "0 5"], "outputs": ["3\n", "4", "5.0"]}


@pytest.mark.parametrize(
    ("answer", "truth", "wanted"),
    [
        (SUM.format(op="+"), SUMS, 1.0),
        (SUM.format(op="+"), json.dumps(SUMS), 1.0),
        (SUM.format(op="*"), SUMS, 1 / 3),
        ("```python\nprint(3)\n```\nNo:\n" + SUM.format(op="+"), SUMS, 1.0),
        ("print(sum(map(int, input().split())))", SUMS, 1.0),
        ("```python\nthis is no Python\n```", SUMS, 0.0),
        ("```python\ndef add(a, b):\n    return a + b\n```", {"assert_case": ["assert add(1, 2) == 3"]}, 1.0),
        (
            "```python\ndef add(a, b):\n    return a * b\n```",
            {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]},
            0.5,
        ),
        ("```python\nimport os\nos._exit(0)\n```", {"assert_case": "assert add(1, 2) == 3"}, 0.0),
        (
            "```python\nclass Solution:\n    def add(self, a, b):\n        return [a, b]\n```",
            {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [[1, 2], [[3, 4]]]},
            1.0,
        ),
        (
            "```python\ndef add(a, b):\n    return {'sums': (a + b, 1)}\n```",
            {
                "fn_name": "add",
                "inputs": ["0.1\n0.2", "1\n2", "1\n1000000"],
                "outputs": ['{"sums": [0.3, 1]}', '{"sums": [3, 2]}', '{"sums": [1000000, 1]}'],
            },
            1 / 3,
        ),
        (
            "```python\nimport dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: 'int'\n```",
            {"tests": ["assert __name__ == '__main__' and pickle.loads(pickle.dumps(A(1))) == A(1)"]},
            1.0,
        ),
        ("```python\nx = bytearray(64 * 2**30)\n```", SUMS, 0.0),
        ("```python\nwhile True: print('x' * 10**6)\n```", SUMS, 0.0),
    ],
)
def test_code(judges: dict[str, FunctionVerifier], answer: str, truth: Any, wanted: float) -> None:
    assert score(judges["code"], answer, truth) == pytest.approx(wanted)


CHEAT = """
import os, re, sys
places = ["program.py", sys.argv[0], sys.modules["__main__"].__file__]
places += map("/proc/self/fd/{}".format, range(64))
def read(place):
    try:
        return open(place, errors="replace").read()
    except OSError:
        return ""
texts = [*map(read, places), read("/proc/self/cmdline"), read("/proc/self/environ"), *sys.argv]
print(*[found for text in texts for found in re.findall("[0-9a-f]{16}", text)], sep="\\n", flush=True)
os._exit(0)
"""


def test_code_cannot_forge_a_passed_test(judges: dict[str, FunctionVerifier]) -> None:
    assert score(judges["code"], CHEAT, {"assert_case": "assert add(1, 2) == 3"}) == 0.0


LIMITS = """
import resource
names = ("FSIZE", "NOFILE", "CPU")
print(*[resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0] > 0 for name in names])
"""


def test_code_runs_within_limits(judges: dict[str, FunctionVerifier]) -> None:
    tests = {"inputs": [""], "outputs": ["True True True"]}
    assert score(judges["code"], f"```python\n{LIMITS}\n```", tests) == 1.0  # -1 is no limit


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ('{"age": 3}', SCHEMA, True),
        ('{"age": "3"}', json.dumps(SCHEMA), False),
        ('Here:\n```json\n{"age": 3}\n```', SCHEMA, True),
        ('<think>{"age": 1}</think>{"age": 3}', SCHEMA, True),
        ("[1, 2.0]", [1, 2], True),
        ("[true, 2]", [1, 2], False),
        ('{"b": [1], "a": null}', '{"a": null, "b": [1]}', True),
        ('{"items": [1, 2]}', {"items": [1, 2]}, True),  # a value although the key is a schema's
        ('{"type": "object"}', {"const": {"type": "object"}}, True),
        ("no JSON", SCHEMA, False),
        ("[" * 100_000, SCHEMA, False),
        ("3", {"$ref": "#/$defs/age", "$defs": {"age": {"type": "integer"}}}, True),
    ],
)
def test_json(judges: dict[str, FunctionVerifier], answer: str, truth: Any, right: bool) -> None:
    assert score(judges["json"], answer, truth) == float(right)


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("So \\boxed{B}.", "B"),
        ("\\boxed{\\text{C}}", "C"),
        ("Answer: B", "B"),
        ("**Answer:** (b)", "B"),
        ("The answer is A, no: the answer is D.", "D"),
        ("A is wrong, so (C)", "C"),
        ("Therefore\nB) Paris", "B"),
        ("D", "D"),
        ("The answer I would choose is (C).", "C"),
        ("The answer A gives is wrong, so C.\nC", "C"),
        ("The answer is $C$", "C"),
        ("The answer is \\(C\\).", "C"),
        ("The answer is: \\text{C}", "C"),
        ("The answer is $\\text{(C)}$", "C"),
        ("The correct answer is **option B**.", "B"),
        ("The answer is B.\n\n**C**", "C"),
        ("B is my answer: none is better", None),
        ("The answer is Paris", None),
        ("A dog. I think not", None),
    ],
)
def test_choice(judges: dict[str, FunctionVerifier], answer: str, chosen: str | None) -> None:
    right = [letter for letter in "ABCDP" if score(judges["choice"], answer, letter) == 1.0]
    assert right == ([chosen] if chosen else [])
    assert score(judges["choice"], answer, f"({chosen or 'A'})") == float(chosen is not None)


@pytest.mark.parametrize(
    ("name", "truth", "problem"),
    [
        ("math", "", "ground_truth='' holds no formula"),
        ("code", "print(3)", r"ground_truth='print\(3\)' is not JSON"),
        ("code", {"input": []}, r"ground_truth has input: give \{inputs"),
        ("code", {"inputs": [], "outputs": []}, "ground_truth has no test"),
        ("code", {"inputs": ["1"], "outputs": []}, "lists of one length"),
        ("json", "{age", "ground_truth='{age' is not JSON"),
        ("json", {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": 3}, r"Schema: \$\.type"),
        ("json", {"$ref": "http://127.0.0.1:9/age"}, "ref='http://127.0.0.1:9/age' does not resolve: put"),
        ("json", {"$ref": "#/$defs/age", "$defs": {}}, "defs/age' does not resolve"),
        ("choice", "Paris", "ground_truth='Paris' is not a letter"),
    ],
)
def test_a_ground_truth_of_the_wrong_type_is_named(
    judges: dict[str, FunctionVerifier], name: str, truth: Any, problem: str
) -> None:
    with pytest.raises(RewardError, match=rf"^spec\.reward\.builtin={name}: .*{problem}"):
        judges[name].check(Item(0, "3", Record("mine", truth, {})))
