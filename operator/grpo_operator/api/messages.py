"""Messages between the operator and the processes of a job: answers to ``GET /v1/status``.

The writer builds these models and the reader parses them, so both ends share one definition. The two may be
of different releases: readers ignore keys that they do not know, at every level, and use the default for a
missing one. So a field that is added needs a default.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from grpo_operator.api.v1alpha1.profile_request import ProfileRequest
from grpo_operator.api.v1alpha1.profile_status import ProfileState
from grpo_operator.api.v1alpha1.status import (
    DataStatus,
    EngineState,
    HostState,
    Phase,
    RestartCounts,
    TokensStatus,
)


class Message(BaseModel):
    """Base of the messages: camelCase keys on the wire, immutable."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Return the message that ``obj`` holds, without keys that only a newer release knows.

        Nested models refuse unknown keys where users write them, but not within a message.
        """
        return super().model_validate(obj, **{"extra": "ignore"} | options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Return the message in ``json_data``, as ``model_validate`` does."""
        return super().model_validate_json(json_data, **{"extra": "ignore"} | options)

    def wire(self) -> dict[str, Any]:
        """Return the message as JSON-compatible data with camelCase keys."""
        return self.model_dump(by_alias=True, mode="json")

    def updated(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced, given by their Python names.

        Raises TypeError for an unknown field and ValidationError for an invalid value.
        """
        fields = type(self).model_fields
        unknown = changes.keys() - fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return type(self).model_validate({name: getattr(self, name) for name in fields} | changes)


class RestoredState(Message):
    """State that the current attempt started from. ``source``: where it was read, for example ``store``."""

    step: int
    source: str


class RecoveryReport(Message):
    """A recovery that is complete; see RecoveryStatus."""

    cause: str
    step: int
    seconds: str
    parts: dict[str, str] = Field(default_factory=dict)


class MemoryCopies(Message):
    """Copies in the memory of the training pods; see MemoryCopiesStatus. ``problem``: the last failure."""

    step: int | None = None
    failures: int = 0
    problem: str = ""


class TrainerProcess(Message):
    """One rank of the training gang: its node address and process id."""

    rank: int
    address: str
    pid: int


class Straggler(Message):
    """A rank whose own computing is slow. ``ratio``: to its peers' median; ``steps``: slow ones in a row."""

    rank: int
    pod: str
    ratio: float
    steps: int


class NodeFailures(Message):
    """Failures of ranks on one node. ``reason``: of the last one. ``avoided``: there are too many."""

    node: str
    failures: int
    reason: str
    avoided: bool = False


class ProfileOrder(Message):
    """A profile that the operator asks the controller for. ``id``: names its folder in the store."""

    id: str
    request: ProfileRequest


class ProfileReport(Message):
    """Outcome of a ProfileOrder so far; see ProfileStatus."""

    id: str
    state: ProfileState = ProfileState.REQUESTED
    path: str = ""
    files: list[str] = Field(default_factory=list)
    message: str = ""
    started_at: str = ""
    finished_at: str = ""


class EngineSummary(Message):
    """One engine as the controller sees it. ``version``: the weights it serves, None unless it serves any."""

    name: str
    address: str
    state: EngineState
    version: int | None = None
    restarts: int = 0
    reason: str = ""


class ValidationResult(Message):
    """Mean score of a validation set: after the last step that was validated, and the best one."""

    set: str
    step: int
    score: float
    best_step: int
    best_score: float


class ControllerStatus(Message):
    """Progress of a run, served by the controller pod. It is also served while that pod fetches volumes.

    ``attempt``: starts of the controller or of the training gang; 0 until the controller has read the
    run's record, and then ``step`` and ``restarts`` are not known yet either. ``reward_mean``,
    ``tokens_per_second_per_gpu`` and ``step_seconds`` are those of the last step. ``last_checkpoint``: step
    of the newest complete checkpoint, ``checkpoint_location`` its folder, and ``checkpoint_time`` when it was
    complete (RFC 3339, UTC), "" if this controller has found it. ``memory_copies``: None without
    checkpoint.memory and before the first restore. ``stalled``: why the run makes no progress, or "".
    ``waiting``: what the parked trainers wait for, why and since when, or "". ``times_parked``: how often
    they were parked. ``recent_failures``: failures that no finished step has made up for yet, of any cause.
    ``backoff_seconds``: delay of the next restart if its cause is outside of the job. ``last_failure``:
    reason of the last restart. ``last_recovery``: the latest that this controller has completed.
    ``next_attempt``: time of the next attempt (RFC 3339, UTC) while the back-off of a restart lasts, or "".
    ``network``: what NCCL uses between trainers with GPUs. ``network_problem``:
    why that is not what the spec asks for, or "". ``checkpoint_problem``: why a checkpoint is put off, or "".
    ``sandbox_problem``: what the sandbox of programs lacks, or "".
    ``stragglers``: the slowest of them, first. ``straggler_count``: of all.
    ``node_failures``: failures by node, those with the most first. ``forget_nodes``: the user's last request
    to forget them.
    ``profiles``: those that this controller was asked for. ``gpu_seconds``: of the whole run, by use.
    ``lost_gpu_seconds``: idle and replayed ones, by cause. ``superseded``: another controller has taken over;
    the answer's status code is 410 (Gone) then.
    ``writer``: identity of the job, "" from an image that does not report it yet.
    ``validation``: of each validation set. ``regressed``: the run has failed because scores have fallen,
    ``diverged``: because a metric has stayed outside of its range.
    ``resumed_from``: checkpoint of another job that this controller has started the job from, or "".
    ``resumes``: those in its JobConfig, None from an image that does not report them yet.
    """

    phase: Phase = Phase.STARTING
    message: str = ""
    step: int = 0
    total_steps: int = 0
    weight_version: int | None = None
    reward_mean: float | None = None
    tokens_per_second_per_gpu: float | None = None
    step_seconds: float | None = None
    last_checkpoint: int | None = None
    checkpoint_location: str = ""
    checkpoint_time: str = ""
    memory_copies: MemoryCopies | None = None
    restored: RestoredState | None = None
    attempt: int = 0
    restarts: RestartCounts = Field(default_factory=RestartCounts)
    waiting: str = ""
    times_parked: int = 0
    recent_failures: int = 0
    backoff_seconds: int = 0
    last_failure: str = ""
    last_recovery: RecoveryReport | None = None
    next_attempt: str = ""
    suspend_requested: bool = False
    trainers: list[TrainerProcess] = Field(default_factory=list)
    tokens: TokensStatus | None = None
    data: DataStatus | None = None
    stalled: str = ""
    network: str = ""
    network_problem: str = ""
    checkpoint_problem: str = ""
    sandbox_problem: str = ""
    stragglers: list[Straggler] = Field(default_factory=list)
    straggler_count: int = 0
    node_failures: list[NodeFailures] = Field(default_factory=list)
    forget_nodes: str = ""
    gpu_seconds: dict[str, int] = Field(default_factory=dict)
    lost_gpu_seconds: dict[str, int] = Field(default_factory=dict)
    engines: list[EngineSummary] = Field(default_factory=list)
    profiles: list[ProfileReport] = Field(default_factory=list)
    writer: str = ""
    validation: list[ValidationResult] = Field(default_factory=list)
    regressed: bool = False
    diverged: bool = False
    resumed_from: str = ""
    resumes: int | None = None
    superseded: bool = False


class EngineHost(Message):
    """One host of an engine of several hosts. ``host``: 0 for the leader. ``pod``: name of its pod."""

    host: int
    pod: str
    state: HostState


class AgentStatus(Message):
    """One engine's weights and state, served by the agent beside it.

    ``instance``: random id of the agent process, so that a restart of the agent is noticed.
    ``writer``, ``attempt``: the job whose weights the engine accepts, and its newest attempt.
    ``weight_version``: set only while the engine serves.
    ``since``: time of the last state change (RFC 3339, UTC).
    ``restarts``: times that the server was lost.
    ``silent``: the scheduler leaves calls unanswered.
    ``staged_version``: version that the agent can load again from the trainers' host memory.
    ``ranks``: GPUs of the engine. ``bucket_bytes``: largest bucket that it receives.
    ``settled``: the engine holds exactly the GPU memory that it was granted.
    ``waits``: mode colocated, and the trainers use the GPUs.
    ``hosts``: of an engine of several hosts, those that have reported.
    ``versions``: of libraries in the agent's image, which is the engine's too.
    """

    name: str
    state: EngineState
    instance: str = ""
    writer: str | None = None
    attempt: int = 0
    weight_version: int | None = None
    since: str = ""
    restarts: int = 0
    reason: str = ""
    silent: bool = False
    history: list[EngineState] = Field(default_factory=list)
    checksum: str = ""
    staged_version: int | None = None
    ranks: int = 1
    bucket_bytes: int = 0
    settled: bool = False
    waits: bool = False
    hosts: list[EngineHost] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
