"""Contents of ``/etc/grpo/job.json``, which the operator writes and the job's pods read."""

from pathlib import Path
from typing import Any

from grpo_operator.api.messages import Message
from grpo_operator.api.unknown_fields import with_unknown
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.weight_path import WeightPath


class JobConfig(Message):
    """Spec of a job, and the values that the operator chose for it.

    ``spec``: with explicit parallel sizes in place of ``auto``.
    ``rollout_service``: DNS name of the headless service of the job's rollout pool.
    ``min_available``: engines of that pool that must serve a version before the job goes on.
    ``engines``: of that pool, if all are there. ``engine_gpus``: of each engine.
    ``max_running_requests``: of one engine, for those that do not report it.
    ``fp8``: whether the engines hold FP8 weights, in blocks of 128 x 128.
    ``weight_path``: path of the weights into those engines.
    ``writer``: identity of the job towards the engines' agents, which accept weights from one writer only.
    ``store``: folder of the job in the checkpoint store.
    ``fork_from``: folder, or URI of one, in which the checkpoint of ``checkpoint.resumeFrom`` is looked for.
    ``resumes``: number of times that the job was resumed after its end.
    """

    name: str
    namespace: str
    spec: GRPOJobSpec
    rollout_service: str
    min_available: int
    engines: int = 1
    engine_gpus: int = 1
    max_running_requests: int = 128
    fp8: bool
    weight_path: WeightPath
    writer: str
    store: Path
    fork_from: str | None = None
    resumes: int = 0

    def wire(self) -> dict[str, Any]:
        """Return the content of job.json, without unset values: the spec is that of the manifest.

        Neither has it what a release without the field would not write for the same job.
        """
        data = with_unknown(self, self.model_dump(by_alias=True, mode="json", exclude_none=True))
        return {name: value for name, value in data.items() if name != "resumes" or value}
