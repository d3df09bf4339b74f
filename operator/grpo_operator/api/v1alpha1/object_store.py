"""Rules of jobs whose ``checkpoint.store`` is an object store."""

from typing import TYPE_CHECKING

from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.checkpoint import CheckpointSpec

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec


def _is_in_store(checkpoint: CheckpointSpec) -> bool:
    """Return whether the source, unless it is a job, is named like one in the job's own kind of store."""
    source, own = checkpoint.resume_from, checkpoint.store.uri
    if source is None:
        return True
    if own is None:
        return source.uri is None
    return source.path is None and (source.uri is None or source.uri[:2] == own[:2])


# An object store holds checkpoints and records. What writes other files needs a file system.
OBJECT_STORE_RULES: tuple[Rule["GRPOJobSpec"], ...] = (
    Rule(
        "!has(self.checkpoint.resumeFrom) || (has(self.checkpoint.store.uri)"
        " ? !has(self.checkpoint.resumeFrom.path) && (!has(self.checkpoint.resumeFrom.uri)"
        " || self.checkpoint.resumeFrom.uri.startsWith('s3:') == self.checkpoint.store.uri.startsWith('s3:'))"
        " : !has(self.checkpoint.resumeFrom.uri))",
        "checkpoint.resumeFrom.path belongs to a checkpoint.store of kind pvc or path, and"
        " checkpoint.resumeFrom.uri to one of kind uri with the same scheme: copy the checkpoint into the"
        " job's store, and name it there",
        lambda job: _is_in_store(job.checkpoint),
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
