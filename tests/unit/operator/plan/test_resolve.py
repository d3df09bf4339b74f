"""From spec to plan: auto, refusals that name field, value and remedy, and the command line."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import PoolRef, RolloutPoolSpec, RolloutSpec, RolloutTemplate
from grpo_operator.cli.plan import main
from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY
from grpo_operator.plan.planner.pool_checks import check_pool, check_reference
from grpo_operator.plan.planner.resolve import JobPlan, RefusedError, resolve
from support.objects import pool_of

ROOT = Path(__file__).parents[4]
LARGE = ROOT / "manifests" / "deepseek-v3-512xh100.yaml"

DRAFTS: dict[str, Any] = {
    "model__multiTokenPrediction": True,
    "rollout__template__engine__speculative": "mtp",
    "rollout__template__engine__returnRoutedExperts": False,
    "algorithm__routingReplay": False,
}


def _spec(**changes: Any) -> dict[str, Any]:
    """Return the large job's spec with values replaced by dotted path."""
    spec = copy.deepcopy(dict(yaml.safe_load(LARGE.read_text())["spec"]))
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = spec
        for parent in parents:
            target = target.setdefault(parent, {})
        if value is None:
            del target[last]
        else:
            target[last] = value
    return spec


def _resolve(**changes: Any) -> JobPlan:
    spec = GRPOJobSpec.model_validate(_spec(**changes))
    return resolve(spec, pool_of(spec))


def test_the_large_job_fits_as_given() -> None:
    plan = _resolve()
    assert str(plan.layout) == "TP2 PP16 CP1 EP16 DP8" and plan.reason == "given"
    assert [stage.layers for stage in plan.stages] == [3, *[4] * 14, 2]
    assert plan.engine_memory is not None and plan.engine_memory.kv_tokens > 16384


def test_versions_in_host_memory_have_the_multi_token_prediction_layer() -> None:
    plain, trained = _resolve().host, _resolve(model__multiTokenPrediction=True).host
    assert plain is not None and trained is not None
    assert trained.staged / plain.staged == pytest.approx(1.0174, abs=0.0001)


def test_exports_beside_steps_have_a_copy_of_the_weights_in_host_memory() -> None:
    plain, exporting = _resolve().host, _resolve(checkpoint__exportEverySteps=50).host
    assert plain is not None and exporting is not None and plain.exporting == 0
    # The pod of the largest stage has more than its share of the model.
    assert 1.0 <= exporting.exporting / (2 * 671e9 * 8 / 256) < 10
    assert exporting.trainer == plain.trainer + exporting.exporting


def test_auto_chooses_and_explains() -> None:
    plan = _resolve(trainer__parallelism={"auto": True})
    assert str(plan.layout) == "TP2 PP16 CP1 EP16 VPP2 DP8", "the manifest's, with virtual stages"
    assert "fastest by estimate of" in plan.reason and "next is" in plan.reason
    assert "s for an optimizer step over 2048 sequences of the full length of 16384 tokens" in plan.reason
    assert plan == _resolve(trainer__parallelism={"auto": True})


@pytest.mark.parametrize(
    ("changes", "reason", "texts"),
    [
        (
            {"trainer__nodes": 64, "trainer__parallelism": {"tensor": 8, "pipeline": 8, "expert": 8,
             "layersInFirstStage": 7, "layersInLastStage": 6}},
            "Infeasible",
            ["spec.trainer.parallelism: TP8 PP8 CP1 EP8 DP8 on 512 needs", "before activations", "try TP"],
        ),
        ({"trainer__nodes": 8, "trainer__parallelism": {"auto": True}}, "Infeasible", ["no layout of 64"]),
        ({"model__architecture": None, "trainer__parallelism": {"auto": True}}, "InvalidSpec",
         ["cannot read /models/DeepSeek-V3: set spec.model.architecture"]),
        ({"trainer__parallelism": {"tensor": 8, "pipeline": 8, "expert": 32}}, "InvalidSpec",
         ["spec.trainer.parallelism.pipeline=8: 61 layers", "layersInFirstStage=7"]),
        ({"trainer__maxTokensPerGpu": None, "trainer__microBatchSizePerGpu": 3}, "InvalidSpec",
         ["miniBatchSize x samplesPerPrompt = 2048"]),
        ({"trainer__maxTokensPerGpu": None, "trainer__logProbMicroBatchSizePerGpu": 3}, "InvalidSpec",
         ["size 8 x logProbMicroBatchSizePerGpu 3 = 24: change one of them"]),
        ({"trainer__logProbMaxTokensPerGpu": 2**20}, "Infeasible",
         ["spec.trainer.logProbMaxTokensPerGpu=1048576: a pass without gradients needs 421.2 GB beside",
          "79.5 GB are usable: lower it (the update has 16384), or remove it"]),
        ({"trainer__maxTokensPerGpu": None, "trainer__logProbMicroBatchSizePerGpu": 64}, "Infeasible",
         ["spec.trainer.logProbMicroBatchSizePerGpu=64: a pass", "(the update has 1), or remove it"]),
        ({"trainer__logProbMaxTokensPerGpu": 2**22, "trainer__parallelism": {"auto": True}}, "Infeasible",
         ["no layout of 256", "lower spec.trainer.logProbMaxTokensPerGpu=4194304, add nodes"]),
        ({"rollout__template__engine__quantization": "none",
          "rollout__template__engine__memoryFraction": 0.75}, "Infeasible",
         ["tensorParallel=32: weights take", "quantization to fp8-block128"]),
        ({"rollout__template__engine__doubleBuffer": True}, "Infeasible",
         ["engine.doubleBuffer=true: a second copy of the weights takes 39.5 GB", "doubleBuffer to false"]),
        ({"rollout__template__engine__doubleBuffer": True,
          "rollout__template__engine__gpuType": "h200-141gb"}, "Infeasible",
         ["engine.doubleBuffer=true: a second copy", "set memoryFraction to 0.69 or less"]),
        ({"rollout__template__engine__expertParallel": 1, "rollout__template__engine__moeA2aBackend": None},
         "InvalidSpec", ["spec.rollout.template.engine.expertParallel=1", "raise expertParallel"]),
        ({"rollout__template__engine__moeA2aBackend": None}, "InvalidSpec",
         ["the width of the shared experts (2048)", "set moeA2aBackend to deepep"]),
        ({**DRAFTS, "model__architecture": "qwen3-235b-a22b", "trainer__parallelism": {"auto": True}},
         "InvalidSpec",
         ["spec.rollout.template.engine.speculative=mtp: this qwen3_moe model has "
          "num_nextn_predict_layers=0", "set speculative to none"]),
        ({"trainer__moe": {"auxLossCoefficient": 0.001}, "model__architecture": "qwen3-8b"}, "InvalidSpec",
         ["spec.trainer.moe.auxLossCoefficient=0.001: a qwen3 model has no experts: remove"]),
        ({"trainer__moe": {"biasUpdateRate": 0}, "model__architecture": "qwen3-235b-a22b"}, "InvalidSpec",
         ["spec.trainer.moe.biasUpdateRate=0: the routers of a qwen3_moe model have no expert bias: remove"]),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else next(iter(value)),
)  # fmt: skip
def test_a_refusal_names_field_value_and_remedy(
    changes: dict[str, Any], reason: str, texts: list[str]
) -> None:
    with pytest.raises(RefusedError) as caught:
        _resolve(**changes)
    assert caught.value.reason == reason
    for text in texts:
        assert text in str(caught.value)


def test_deepep_needs_a_layout_with_expert_parallelism() -> None:
    spec = yaml.safe_load((ROOT / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    spec["trainer"] |= {
        "device": "cuda", "nodes": 1, "gpusPerNode": 1, "parallelism": {"auto": True},
        "moe": {"dispatcher": "deepep"},
    }  # fmt: skip
    engine = spec["rollout"]["template"]["engine"]
    engine |= {"device": "cuda", "gpusPerNode": engine.get("tensorParallel", 1)}
    job = GRPOJobSpec.model_validate(spec)
    with pytest.raises(
        RefusedError, match=r"moe\.dispatcher=deepep needs expert parallelism, and auto chose TP1"
    ):
        resolve(job, pool_of(job))


def test_the_layer_that_drafts_takes_memory_of_the_engines() -> None:
    plain, drafting = _resolve().engine_memory, _resolve(**DRAFTS).engine_memory
    assert plain is not None and drafting is not None
    assert drafting.kv_per_token == plain.kv_per_token * 62 // 61
    experts, shared = 256 * 3 * 7168 * 2048 // 32, 3 * 7168 * 2048  # in FP8; deepep copies the shared expert
    attention = 187_105_280  # of one layer, in FP8, whole on each GPU as there are 32 replicas
    projection = 2 * 7168 * 7168 * 2  # in bf16, whole on each GPU
    added = drafting.weights - plain.weights
    assert added == pytest.approx(experts + shared + attention + projection, rel=0.01)
    assert drafting.kv_tokens < plain.kv_tokens


def test_engines_draft_only_with_a_layer_that_the_trainer_publishes() -> None:
    with pytest.raises(ValueError, match=r"speculative mtp needs model\.multiTokenPrediction true"):
        _resolve(**DRAFTS | {"model__multiTokenPrediction": False})
    with pytest.raises(ValueError, match=r"speculative mtp excludes algorithm\.minP"):
        _resolve(**DRAFTS, algorithm__minP=0.1)


def test_a_pool_that_drafts_is_checked_with_its_jobs() -> None:
    spec = GRPOJobSpec.model_validate(_spec(**DRAFTS))
    template = {name: getattr(pool_of(spec), name) for name in RolloutTemplate.model_fields}
    pool = RolloutPoolSpec(model=spec.model.model_copy(update={"volume": None}), **template)
    check_pool(pool)
    silent = pool.model.model_copy(update={"multi_token_prediction": False})
    with pytest.raises(RefusedError, match=r"spec\.engine\.speculative=mtp: jobs must load and publish"):
        check_pool(pool.model_copy(update={"model": silent}))
    algorithm = spec.algorithm.model_copy(update={"min_p": 0.1})
    job = spec.model_copy(
        update={"algorithm": algorithm, "rollout": RolloutSpec(pool_ref=PoolRef(name="shared"))}
    )
    with pytest.raises(RefusedError, match=r"spec\.algorithm\.minP=0\.1: RolloutPool shared drafts"):
        check_reference(job, pool)


def _shm(name: str, size: str, mounted: bool = False) -> dict[str, Any]:
    """Return changes to a pod whose /dev/shm has a size; not ``mounted``: the operator's volume."""
    volume = {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    mount = {"name": name, "mountPath": "/dev/shm"}
    containers = [{"name": "ray-worker", "volumeMounts": [mount]}] if mounted else []
    return {"spec": {"volumes": [volume], "containers": containers}}


def test_shared_memory_of_a_pod_template_that_holds_a_step_is_accepted() -> None:
    plan = _resolve()
    assert plan.host is not None
    enough = f"{-(-plan.host.shared // 2**30)}Gi"
    for template in (_shm("shm", enough), _shm("large", enough, mounted=True), _shm("other", "1Mi")):
        assert _resolve(trainer__podTemplate=template).host == plan.host


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer__resources__memory": "250Gi"}, "spec.trainer.resources.memory=250Gi: data alone take"),
        ({"controller__resources__memory": "6Gi"}, "spec.controller.resources.memory=6Gi"),
        ({"scheduling__sharedMemory": "1Gi"}, "spec.scheduling.sharedMemory=1Gi"),
        (
            {"trainer__podTemplate": _shm("shm", "2Gi")},
            "spec.trainer.podTemplate.spec.volumes[shm].emptyDir.sizeLimit=2Gi: data alone take",
        ),
        (
            {"trainer__podTemplate": _shm("large", "2Gi", mounted=True)},
            "spec.trainer.podTemplate.spec.volumes[large].emptyDir.sizeLimit=2Gi: data alone take",
        ),
        (
            {"checkpoint__memory": {"everySteps": 1}, "trainer__resources__memory": "600Gi"},
            "spec.trainer.resources.memory",
        ),
        (
            {"checkpoint__memory": {"everySteps": 1}, "trainer__agentResources": {"memory": "600Gi"}},
            "spec.trainer.agentResources.memory=600Gi: data alone take 922Gi: set it to 922Gi",
        ),
        (
            {
                "weightSync": {"mode": "delta"},
                "rollout__template__agentResources": {"memory": "600Gi"},
            },
            "spec.rollout.template.agentResources.memory=600Gi: data alone take 627Gi: set it to 628Gi",
        ),
        (
            {
                "rollout__template__engine__returnRoutedExperts": True,
                "rollout__template__resources": {"memory": "7Gi"},
            },
            "spec.rollout.template.resources.memory=7Gi: data alone take 8Gi: set it to 56Gi",
        ),
    ],
)
def test_host_memory_that_is_too_small_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedError) as caught:
        _resolve(**changes)
    assert caught.value.reason == "Infeasible" and field in str(caught.value)


def test_host_memory_grows_with_what_is_kept_there() -> None:
    plain, enough = _resolve().host, {"trainer__resources__memory": "4000Gi"}
    tier = _resolve(**enough, checkpoint__memory={"replicas": 2}).host
    resident = _resolve(**enough, trainer__offload=None, trainer__parallelism={"auto": True}).host
    assert plain is not None and tier is not None and resident is not None
    assert tier.copies > 0 == plain.copies and tier.trainer - plain.trainer == tier.copies
    assert tier.trainer_agent - AGENT_MEMORY == (2 * 2 + 1) * tier.copies // 3, "of two pods, and its own"
    assert plain.trainer_agent == AGENT_MEMORY
    assert resident.moved == 0 < plain.moved
    assert _resolve(model__architecture=None).host is None


def test_memory_of_routed_experts_is_bounded_by_their_volume() -> None:
    small = {
        "rollout__template__engine__returnRoutedExperts": True,
        "rollout__template__engine__routedExpertsGibibytes": 4,
    }
    assert _resolve(**small, rollout__template__resources={"memory": "60Gi"}).host is not None
    with pytest.raises(
        RefusedError, match=r"template\.resources\.memory=3Gi: data alone take 4Gi: set it to 52Gi"
    ):
        _resolve(**small, rollout__template__resources={"memory": "3Gi"})


def test_a_snapshot_has_all_that_a_rank_saves() -> None:
    tier = {"checkpoint__memory": {"replicas": 1}}
    plain = _resolve(**tier).host
    refreshed = _resolve(**tier, algorithm__refreshReferenceSteps=1).host
    assert plain is not None and refreshed is not None
    largest = max(stage.weights for stage in _resolve(**tier).stages)
    assert refreshed.copies - plain.copies == 3 * 8 * largest, "the reference, in three copies of eight ranks"


def test_an_agents_memory_grows_with_the_model_only_if_it_keeps_versions() -> None:
    streaming, nixl = _resolve(), _resolve(weightSync={"transport": "nixl"})
    deltas = _resolve(weightSync={"mode": "delta"})
    assert streaming.host is not None and nixl.host is not None and deltas.host is not None
    assert streaming.host.agent == AGENT_MEMORY
    assert nixl.host.agent == deltas.host.agent > streaming.host.agent + 600e9


def test_a_model_that_only_the_pods_can_read_is_run_as_given() -> None:
    plan = _resolve(model__architecture=None)
    assert plan.stages == () and plan.model is None


def test_the_command_line_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(LARGE)]) == 0
    table = capsys.readouterr().out
    assert "TP2 PP16 CP1 EP16" in table and "10.1 TB" in table and "at least 0.49 s" in table
    assert "expected step" in table and "generation" in table and "log-normal" in table
    assert main([str(LARGE), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["pools"]["rollout"]["gpus"] == 256
    assert plan["stages"][1]["total"] < plan["usable_per_gpu"]


def test_assumptions_of_the_step_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*options: str) -> dict[str, Any]:
        assert main([str(LARGE), "--json", *options]) == 0
        (plan,) = json.loads(capsys.readouterr().out)
        return dict(plan["step"])

    plain = step()
    assert step("--mean-response", "8000")["seconds"] > 1.3 * plain["seconds"]
    better = step("--training-efficiency", "0.9")
    assert better["phases"]["update_actor"] < plain["phases"]["update_actor"]
    assert better["phases"]["gen"] == plain["phases"]["gen"] and better["assumed"]["flops"] == 0.9
    assert main([str(LARGE), "--mean-response", "1e9"]) == 1
    assert "a mean response of 1e+09 tokens is impossible" in capsys.readouterr().out


def test_the_command_line_explains_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump({"kind": "GRPOJob", "spec": _spec(trainer__nodes=-1)}))
    assert main([str(bad)]) == 1
    assert "spec.trainer.nodes" in capsys.readouterr().out
    bad.write_text("kind: Pod")
    assert main([str(bad)]) == 2 and "no object of kind GRPOJob" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.yaml")]) == 2
