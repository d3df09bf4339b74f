"""Rules of jobs whose ``checkpoint.store`` is an object store."""

from typing import TYPE_CHECKING

from grpo_operator.api.rules import Rule

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

# An object store holds checkpoints and records. What writes other files, or needs links, needs a file system.
OBJECT_STORE_RULES: tuple[Rule["GRPOJobSpec"], ...] = (
    Rule(
        "!has(self.checkpoint.store.uri) || !has(self.checkpoint.resumeFrom)",
        "checkpoint.store.uri excludes checkpoint.resumeFrom, which links files: remove it, or use a store of"
        " kind pvc or path",
        lambda job: job.checkpoint.store.uri is None or job.checkpoint.resume_from is None,
    ),
    Rule(
        "!has(self.checkpoint.store.uri) || self.staleness.maxVersionLag == 0"
        " || !self.algorithm.routingReplay",
        "checkpoint.store.uri with staleness.maxVersionLag 1 excludes algorithm.routingReplay, whose experts"
        " are kept in a file system: set maxVersionLag to 0, or use a store of kind pvc or path",
        lambda job: (
            job.checkpoint.store.uri is None
            or job.staleness.max_version_lag == 0
            or not job.algorithm.routing_replay
        ),
    ),
    Rule(
        "!has(self.checkpoint.store.uri)"
        " || !(has(self.model.volume) && has(self.model.volume.uri))"
        " && !(has(self.data.volume) && has(self.data.volume.uri))",
        "checkpoint.store.uri excludes model.volume.uri and data.volume.uri, which are downloaded into a file"
        " system: set pvc or path in these volumes, or use a store of kind pvc or path",
        lambda job: (
            job.checkpoint.store.uri is None
            or not any(volume and volume.uri for volume in (job.model.volume, job.data.volume))
        ),
    ),
)
