"""Page of the manifests: what each one shows, and its GPUs, model, algorithm and data."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from grpo_devcluster.reference.markdown import table
from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate

_HEAD = """# Examples

Manifests to start from. `grpo-plan FILE` prints layout, memory and expected step of each without a cluster;
[limits](../limits.md#gpus) say what has been run on GPUs. Storage comes from [volumes](../guides/volumes.md).
Jobs of other frameworks are [converted](../guides/from-verl.md).

## Jobs

{jobs}
*+*: GPUs that train, and GPUs that generate. *Shared*: both take turns on them, as
[colocated jobs](../guides/colocated.md) do. *GRPO x 16*: 16 samples per prompt. Models `preset:...` have
random weights, and nothing is downloaded.

## Admission policies

{policies}
How they work: [admission policies](../guides/admission.md).
"""
_ESTIMATORS = {
    "grpo": "GRPO", "rloo": "RLOO", "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with baseline", "gae": "PPO",
}  # fmt: skip
_SENTENCE = re.compile(r"(?<=\.) ")


def examples_page(manifests: Path) -> str:
    """Return the page for the folder ``manifests``, smallest jobs first."""
    files = sorted(manifests.rglob("*.yaml"))
    policies = [file for file in files if file.parent.name == "policies"]
    jobs = sorted((_gpus(_spec(file)), file) for file in files if file not in policies)
    return _HEAD.format(
        jobs=table(
            ("manifest", "GPUs", "model, algorithm and data", "what it shows"),
            (_job(file, manifests) for _, file in jobs),
        ),
        policies=table(("manifest", "what it does"), ((_link(p, manifests), _shows(p)) for p in policies)),
    )


def _job(file: Path, manifests: Path) -> tuple[str, ...]:
    spec = _spec(file)
    model = spec.model.path if spec.model.path.startswith("preset:") else Path(spec.model.path).name
    run = f"{model}, {_algorithm(spec.algorithm)}, {_data(spec)}"
    return _link(file, manifests), _gpu_text(spec), run, _shows(file)


def _spec(file: Path) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(yaml.safe_load(file.read_text())["spec"])


def _pool(spec: GRPOJobSpec) -> RolloutTemplate:
    if spec.rollout.template is None:
        raise ValueError("spec.rollout.template: a manifest needs engines of its own to be in the gallery")
    return spec.rollout.template


def _gpus(spec: GRPOJobSpec) -> int:
    """Return the number of GPUs; those that trainer and engines share count once."""
    if spec.trainer.device == Device.CPU:
        return 0
    pool = _pool(spec)
    return spec.trainer.world + (
        0 if spec.mode == "colocated" else pool.replicas * pool.engine.tensor_parallel
    )


def _gpu_text(spec: GRPOJobSpec) -> str:
    if not _gpus(spec):
        return "none: CPUs"
    train, kind = spec.trainer.world, spec.trainer.gpu_type.value
    if spec.mode == "colocated":
        return f"{train} x {kind}, shared"
    return f"{train} + {_gpus(spec) - train} x {kind}"


def _algorithm(spec: AlgorithmSpec) -> str:
    name = _ESTIMATORS[spec.adv_estimator]
    if spec.filter_groups is not None:
        name = "DAPO"
    elif spec.policy_loss == "gspo":
        name = "GSPO"
    elif spec.adv_estimator == "grpo" and not spec.norm_adv_by_std:
        name = "Dr.GRPO"
    return f"{name} x {spec.samples_per_prompt}"


def _data(spec: GRPOJobSpec) -> str:
    reward = spec.reward
    if spec.data.train.startswith("reasoning-gym:"):
        return f"`{spec.data.train.partition('?')[0]}`"
    named = f"builtin `{reward.builtin}`" if reward and reward.builtin else "own reward"
    return f"`{spec.data.train}`, {named}"


def _shows(file: Path) -> str:
    """Return the manifest's first comment, up to an empty line, without the hint how to plan it."""
    text = " ".join(_first_comment(file.read_text().splitlines()))
    return " ".join(sentence for sentence in _SENTENCE.split(text) if "grpo-plan" not in sentence)


def _first_comment(lines: list[str]) -> Iterator[str]:
    for line in lines:
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            return
        yield text


def _link(file: Path, manifests: Path) -> str:
    path = file.relative_to(manifests).as_posix()
    return f"[{path.removesuffix('.yaml')}](../../manifests/{path})"
