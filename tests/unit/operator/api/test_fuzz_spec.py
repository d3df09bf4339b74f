"""Damaged specs: each is refused with a message that names the field, or renders all children."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_operator.api.errors import describe
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.planner.settled import with_layout
from grpo_operator.plan.status.grpojob import layout_status, refused_status
from grpo_operator.render.config_map import job_config_map
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import NOW, pool_of

CASES = int(os.environ.get("GRPO_FUZZ_CASES", "1000"))
MANIFESTS = Path(__file__).parents[4] / "manifests"
JOBS = [yaml.safe_load((MANIFESTS / f"{n}.yaml").read_text()) for n in ("tiny-moe", "deepseek-v3-512xh100")]
SETTINGS = OperatorSettings("trainer:1", "rollout:1")
DELETE = object()

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.integers(0, 64),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "0", "-1", "cuda", "cpu", "full", "deepseek-v3", "☃" * 70, "a" * 300, "10Gi", "1m"]),
)
VALUES = st.one_of(
    SCALARS,
    st.just(DELETE),
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["auto", "tensor", "name", "x", "é"]), SCALARS, max_size=3),
)


def _paths(node: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(node, dict):
        return []
    own = [(*prefix, key) for key in node]
    return own + [path for key, value in node.items() for path in _paths(value, (*prefix, key))]


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """Return a job with up to four fields changed, removed or added."""
    job = copy.deepcopy(draw(st.sampled_from(JOBS)))
    job["metadata"] |= {"namespace": "default", "uid": "12345678-aaaa", "generation": 1}
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(_paths(job["spec"]) or [("x",)]))
        if draw(st.integers(0, 9)) == 0:
            path = (*path[:-1], draw(st.text(min_size=1, max_size=8)))
        target = job["spec"]
        for part in path[:-1]:
            target = target[part]
        value = draw(VALUES)
        if value is DELETE:
            target.pop(path[-1], None)
        else:
            target[path[-1]] = value
    return dict(job)


@settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(damaged())
def test_a_damaged_spec_is_refused_by_field_or_can_be_rendered(job: dict[str, Any]) -> None:
    refusal = _refusal(job)
    if refusal is None:
        return
    assert "spec" in refusal, refusal
    status = refused_status(job, "InvalidSpec", refusal, NOW)
    (stalled,) = [c for c in status.conditions if c.type == "Stalled"]
    assert stalled.status == "True" and stalled.message == refusal[:4096]


def _refusal(job: dict[str, Any]) -> str | None:
    """Return why the job is refused, or None if all its children can be rendered."""
    try:
        spec = GRPOJobSpec.model_validate(job["spec"])
        plan = resolve(spec, pool_of(spec))
    except ValidationError as error:
        return describe(error)
    except RefusedError as error:
        return str(error)
    pool, spec = pool_of(spec), with_layout(spec, layout_status(plan))
    assert all(request.count > 0 for request in job_requests(spec, pool))
    cluster = job_cluster(job, spec, pool, SETTINGS, False).wire()
    json.dumps([cluster, job_config_map(job, spec, "x", pool)], allow_nan=False)
    return None
