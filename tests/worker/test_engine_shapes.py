"""The planner's engine shapes compared with SGLang: accepted ones can be built, with the same weights."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.cpu_engine import environment
from grpo_devcluster.paths import REPO
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec
from grpo_operator.plan.planner.resolve import engine_shape

_LAYERS = {
    "deepseek-v3": 4, "qwen3-30b-a3b": 2, "qwen3-235b-a22b": 2, "qwen3-8b": 2, "llama-3.1-8b": 2,
    "qwen2.5-7b": 2, "glm-4.5-air": 2, "glm-4.7": 4, "kimi-k2": 2,
}  # fmt: skip
_FENCED = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
Answers = dict[str, list[tuple[dict[str, Any], Any]]]  # by the test: cases, and what both say
_SCALES = 0.002  # of the bytes: FP8 scales and the router's bias, which the planner leaves out


def _ask(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.ranks.engine_cases"],
        env=os.environ | environment(folder) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _case(name: str, **shape: Any) -> dict[str, Any]:
    layers = {"num_hidden_layers": _LAYERS[name], "num_nextn_predict_layers": int(shape.get("drafts", False))}
    hf = architecture(name) | layers
    return {"name": name, "hf": hf, "shape": shape}


def _grid() -> list[dict[str, Any]]:
    """Return models in engines of 8 to 64 GPUs, by every field that changes what a GPU holds."""
    cases = [
        _case(
            name, tensor=tensor, expert=expert, attention_data=data, fp8=fp8,
            all_to_all=backend, dp_lm_head=data > 1 and backend,
        )
        for name in ("deepseek-v3", "qwen3-30b-a3b")
        for tensor in (8, 16, 32)
        for expert in (1, tensor)
        for data in (1, tensor)
        for fp8 in (False, True)
        for backend in (False, True)
        if not backend or expert == tensor
    ]  # fmt: skip
    cases += [_case("deepseek-v3", tensor=16, expert=8, attention_data=4, fp8=True)]
    cases += [_case("deepseek-v3", tensor=64, expert=64, attention_data=64, fp8=True, all_to_all=True)]
    cases += [
        _case("deepseek-v3", tensor=8, expert=8, drafts=True),
        _case("deepseek-v3", tensor=16, expert=8, attention_data=4, fp8=True, drafts=True),
        _case(
            "deepseek-v3", tensor=32, expert=32, attention_data=32, fp8=True, all_to_all=True,
            dp_lm_head=True, drafts=True,
        ),
        _case("deepseek-v3", tensor=32, expert=32, attention_data=32, fp8=True, drafts=True),
    ]  # fmt: skip
    cases += [_case("qwen3-8b", tensor=size) for size in (1, 4, 8, 16, 32, 64)]
    cases += [_case("llama-3.1-8b", tensor=size) for size in (1, 16)]
    cases += [_case("qwen2.5-7b", tensor=size) for size in (1, 4, 7, 14)]
    cases += [
        _case(name, tensor=tensor, expert=expert, fp8=fp8)
        for name in ("glm-4.5-air", "glm-4.7", "kimi-k2")
        for tensor, expert in ((8, 1), (8, 8), (16, 16))
        for fp8 in (False, True)
    ]
    cases += [_case("glm-4.7", tensor=16, expert=16, attention_data=4)]
    cases += [
        _case(name, tensor=8, expert=8, attention_data=8, fp8=True, all_to_all=True)
        for name in ("glm-4.5-air", "glm-4.7")
    ]
    return cases


def _agreed(answers: Iterable[tuple[dict[str, Any], Any]]) -> int:
    """Check that both build the same weights or both refuse; return how many cases were built."""
    accepted = 0
    for case, result in answers:
        text = f"{case['name']} {case['shape']}: {result}"
        assert isinstance(result["planner"], int) == isinstance(result["sglang"], int), text
        if isinstance(result["planner"], int):
            assert result["planner"] == pytest.approx(result["sglang"], rel=_SCALES), text
            accepted += 1
    return accepted


def _cases_of(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Return the engines of GRPOJobs and RolloutPools in YAML whose architecture is known."""
    cases = []
    for document in (each for text in texts for each in yaml.safe_load_all(text) if each):
        spec = document.get("spec", {})
        name = spec.get("model", {}).get("architecture")
        template = spec if document.get("kind") == "RolloutPool" else spec.get("rollout", {}).get("template")
        if name is None or template is None:
            continue
        shape = engine_shape(EngineSpec.model_validate(template["engine"]))
        cases.append(_case(name, **{field: getattr(shape, field) for field in shape.__slots__}))
    return cases


def _of_manifests() -> list[dict[str, Any]]:
    return _cases_of(file.read_text() for file in sorted((REPO / "manifests").glob("*.yaml")))


def _of_documents() -> list[dict[str, Any]]:
    files = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
    return _cases_of(text for file in files for text in _FENCED.findall(file.read_text()))


def _damaged() -> list[dict[str, Any]]:
    """SGLang cuts the shared expert of DeepSeek-V3 over all 32 GPUs, to less than a block of FP8."""
    text = (REPO / "docs" / "guides" / "multi-host-engines.md").read_text()
    (pool, *_) = _FENCED.findall(text)
    for old, new in (("nodesPerEngine: 2", "nodesPerEngine: 4"), ("Parallel: 16", "Parallel: 32")):
        assert old in pool
        pool = pool.replace(old, new)
    return _cases_of([pool])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return cases and answers of all tests; one process imports SGLang for them."""
    groups = {
        "grid": _grid(), "manifests": _of_manifests(), "documents": _of_documents(), "damaged": _damaged()
    }  # fmt: skip
    cases = [case for group in groups.values() for case in group]
    found = iter(_ask(cases, tmp_path_factory.mktemp("shapes")))
    return {name: [(case, next(found)) for case in group] for name, group in groups.items()}


@pytest.mark.slow
def test_the_planner_accepts_exactly_what_sglang_can_build(answers: Answers) -> None:
    accepted, cases = _agreed(answers["grid"]), len(answers["grid"])
    assert cases // 4 < accepted < cases, "the cases decide nothing"


def test_the_engines_of_all_manifests_can_be_built(answers: Answers) -> None:
    assert _agreed(answers["manifests"]) == len(answers["manifests"]) > 5


def test_the_engines_of_all_documents_can_be_built(answers: Answers) -> None:
    large = {"tensor": 16, "expert": 16, "attention_data": 16, "fp8": True}
    cases = [case for case, _ in answers["documents"]]
    assert any(case["name"] == "deepseek-v3" and large.items() <= case["shape"].items() for case in cases)
    assert _agreed(answers["documents"]) == len(cases) > 5


def test_a_document_whose_engine_cannot_be_built_is_found(answers: Answers) -> None:
    assert len(answers["damaged"]) == 1 and _agreed(answers["damaged"]) == 0
