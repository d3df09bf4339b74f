"""Page of the manifests: what each one shows, and its GPUs, model, algorithm and data."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_devcluster.reference.markdown import table
from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.cli.manifest import Manifest

_HEAD = """# Examples

Manifests to start from. `grpo-plan FILE` prints layout, memory and expected step of each without a cluster;
[limits](../limits.md#gpus) say what has been run on GPUs. Storage comes from [volumes](../guides/volumes.md).
Jobs of other frameworks are [converted](../guides/from-verl.md).

## Jobs

{jobs}
*+*: GPUs that train, and GPUs that generate. *Of a pool*: those of a [shared
pool](../guides/shared-pools.md). *Shared*: both take turns on them, as [colocated
jobs](../guides/colocated.md) do. *GRPO x 16*: 16 samples per prompt. Models `preset:...` have random weights,
and nothing is downloaded. The comment at the top of a manifest says what to create before it.

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
    jobs = [_Example.read(file) for file in files if file not in policies]
    return _HEAD.format(
        jobs=table(
            ("manifest", "GPUs", "model, algorithm and data", "what it shows"),
            (job.row(manifests) for job in sorted(jobs, key=lambda job: (job.gpus, job.file))),
        ),
        policies=table(("manifest", "what it does"), ((_link(p, manifests), _shows(p)) for p in policies)),
    )


@dataclass(frozen=True, slots=True)
class _Example:
    """A manifest's job. ``pool``: its own engines, or those of the RolloutPool that it refers to."""

    file: Path
    spec: GRPOJobSpec
    pool: RolloutTemplate

    @classmethod
    def read(cls, file: Path) -> "_Example":
        manifest = Manifest.read(file)
        ((_, body),) = manifest.jobs
        spec = GRPOJobSpec.model_validate(body)
        return cls(file, spec, manifest.pool_of(spec))

    @property
    def gpus(self) -> int:
        """Number of GPUs; those that trainer and engines share count once."""
        if self.spec.trainer.device == Device.CPU:
            return 0
        own = 0 if self.spec.mode == "colocated" else self.pool.replicas * self.pool.engine.tensor_parallel
        return self.spec.trainer.world + own

    @property
    def gpu_text(self) -> str:
        if not self.gpus:
            return "none: CPUs"
        train, kind = self.spec.trainer.world, self.spec.trainer.gpu_type.value
        if self.spec.mode == "colocated":
            return f"{train} x {kind}, shared"
        pool = " of a pool" if self.spec.rollout.pool_ref else ""
        return f"{train} + {self.gpus - train}{pool} x {kind}"

    def row(self, manifests: Path) -> tuple[str, ...]:
        """Return the job's row in the table of jobs."""
        path = self.spec.model.path
        model = path if path.startswith("preset:") else Path(path).name
        run = f"{model}, {_algorithm(self.spec.algorithm)}, {_data(self.spec)}"
        return _link(self.file, manifests), self.gpu_text, run, _shows(self.file)


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
