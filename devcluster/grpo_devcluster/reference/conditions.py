"""Page of the conditions and their reasons.

Types and reasons are read from the operator's code. Each reason needs a text below: a reason without a text,
or a text without a reason, fails the generator.
"""

import ast
from collections.abc import Iterator

from grpo_devcluster.paths import REPO
from grpo_devcluster.reference.markdown import called, strings, table
from grpo_operator.api.v1alpha1.status import Phase

_OPERATOR = REPO / "operator" / "grpo_operator"
# Calls whose arguments are reasons: position of the reason among them.
_CALLS = {
    "WaitError": 1,
    "RefusedError": 1,
    "_refuse": 1,
    "set": 2,
    "Problem": 0,
    "Event": 0,
    "event": 1,
    "_release": 1,
}
_TYPES = {
    "Ready": "The job trains, or has succeeded. A pool: at least `minAvailable` engines serve.",
    "Progressing": "The job is starting, training, recovering, suspending or waiting.",
    "Degraded": "The job or pool works with a part of its ranks or engines, or a container fails.",
    "Suspended": "All pods are deleted because of `spec.suspend`.",
    "Succeeded": "The job has finished all steps. It goes on when `totalSteps` is raised.",
    "Failed": "The job has failed. It goes on when the annotation `rl.grpo.dev/resume` gets a new value.",
    "Reconciling": "kstatus: the observed state is not yet the desired one.",
    "Stalled": "kstatus: the spec must be changed. The message names field, value and remedy.",
    "StoreRemoved": "Only present, and false, while a job with `checkpoint.deletionPolicy: Delete` is being "
    "deleted: it is gone when its folder in the store is.",
    "FieldsIgnored": "Only present when true: the spec has fields that this operator does not know.",
}
_EVENT = "Event only."
_REASONS = {
    "InvalidSpec": "The message names the field and a value that is valid. Correct the spec.",
    "Infeasible": "No layout or no node of this cluster fits. The message names the nearest one that does.",
    "WaitingForCapacity": "Nothing to do: the job starts as a whole when enough nodes are free.",
    "WaitingForPool": "Nothing to do: the job starts when the job that uses the pool ends or is suspended.",
    "PoolNotFound": "Create the RolloutPool that `rollout.poolRef` names, or correct the reference.",
    "PoolOwned": "The pool belongs to another job. Refer to a pool that no job owns.",
    "PoolServes": "The pool serves a model of its own (`spec.serve`). Refer to another pool.",
    "PoolMismatch": "Model or context length of job and pool differ. Make them equal.",
    "WaitingForCheckpoint": "Nothing to do: the job starts when the job of `checkpoint.resumeFrom` has the "
    "checkpoint.",
    "SourceNotFound": "Correct `checkpoint.resumeFrom.job`, or name the folder of a deleted job in "
    "`checkpoint.resumeFrom.path`.",
    "SourceUnfit": "The job cannot start from that of `checkpoint.resumeFrom`. The message names field, "
    "value and remedy.",
    "NameTaken": "An object of that name belongs to something else. Choose another name.",
    "KubeRayMissing": "Install KubeRay in the version that the message names.",
    "KubeRayTooOld": "Upgrade KubeRay, or remove the field that needs a newer one.",
    "CrdTooOld": "Apply the CRDs of this operator version: see [upgrades](../guides/upgrades.md).",
    "OlderOperator": "A newer operator has accepted the spec. The message names the fields that this one "
    "ignores. Upgrade it: see [upgrades](../guides/upgrades.md#downgrades).",
    "ApplyRefused": "The message quotes the API server: an invalid `podTemplate`, a quota, or what the "
    "namespace must [allow](../guides/admission.md#policies-of-the-chart).",
    "Unschedulable": "The scheduler finds no node for pods, and the message quotes it: nodes are full or "
    "tainted, or a claim does not exist.",
    "ContainersFailing": "The message names each failing container and its last error.",
    "PodsRefused": "KubeRay cannot create pods. The message quotes the API server: mostly a quota, or the "
    "namespace's [pod security](../concepts/security.md#pods).",
    "NoSamples": "No token arrived for `rollout.stallSeconds` while samples were awaited. The message "
    "says why.",
    "Parked": "The trainers wait, alive, for `minAvailable` engines, for the reward or for room in the "
    "store, and then continue. The message names what is missing and since when.",
    "NodeNotReady": "A node with pods of the job is not Ready. The message names it and says since when. "
    "Its pods are replaced when it has been silent for `evictionSeconds`: see "
    "[scheduling](../guides/scheduling.md#nodes-without-power).",
    "UnhealthyNodes": "More nodes with pods of the job are unhealthy than its pods may leave at a time. The "
    "message names nodes and limit. Look at the nodes and at what marks them, or raise "
    "`scheduling.unhealthyNodes.maxNodesPercent`.",
    "StoreFull": "The store has too little room for the next checkpoint, which is put off. The job trains. "
    "Free what the message says, or enlarge the store.",
    "MemoryCopiesFail": "Copies of `checkpoint.memory` fail again and again. The job trains, but the loss of "
    "a pod would repeat all steps since the last checkpoint. See the "
    "[runbook](../guides/runbooks.md#grpomemorycopiesfail).",
    "PodsRemain": "A deleted job waits for the end of its pods, before its folder in the store is removed.",
    "RemovingStore": "The folder of a deleted job is being removed: see "
    "[checkpoints](../guides/checkpoints.md#delete-a-job).",
    "StoreRemovalFailed": "The folder of a deleted job cannot be removed yet; it is tried again. The message "
    "says why, and how to let the job go without that.",
    "StoreRemoved": f"{_EVENT} The folder of a deleted job is removed.",
    "StoreRetained": f"{_EVENT} The folder of a deleted job stays, and the message says why.",
    "Straggler": "Ranks compute more slowly than others with the same work, and all wait for them. The "
    "message names rank, pod and node. See the [runbook](../guides/runbooks.md#grpostraggler).",
    "NoRdma": "NCCL uses sockets although `scheduling.rdma` asks for RDMA. The job trains, but slowly. See "
    "[networking](../guides/networking.md#what-nccl-chose).",
    "NoLandlock": "`reward.sandbox: bestEffort` runs programs on a node whose kernel has no Landlock. They "
    "can read the files of the controller's pod. See [code of the job](../concepts/job-code.md).",
    "ValidationRegressed": "The job has failed because its scores have fallen (`validation.onRegression`). "
    "The message names the best step. See [validation](../guides/validation.md#when-scores-fall).",
    "Diverged": "The job has failed because a metric has stayed outside of its range (`divergence`). The "
    "message names metric and steps. See [validation](../guides/validation.md#divergence).",
    "PoolsWhole": "All ranks and engines are ready.",
    "PoolsIncomplete": "Some ranks or engines are not ready. They are restarted or replaced.",
    "EnginesServing": "At least `minAvailable` engines serve.",
    "TooFewEngines": "Fewer than `minAvailable` engines serve. The message says what each one lacks.",
    "EnginesMissing": "Fewer than `replicas` engines serve.",
    "EnginesStarting": "Engines are starting or load weights.",
    "PoolWhole": "All engines serve.",
    "Reconciled": "The children of the pool are applied.",
    "Resumed": f"{_EVENT} The job goes on after its end; the message says why.",
    "ResumeRefused": f"{_EVENT} The annotation `rl.grpo.dev/resume` changes nothing; the message says why.",
    "TotalStepsChanged": f"{_EVENT} The controller of a running job has taken over a changed `totalSteps`.",
    "TrainingRestarted": f"{_EVENT} The gang was restarted; the message names the cause.",
    "TrainingRolledBack": f"{_EVENT} The job went back to an older checkpoint and skips the prompts since "
    "(`validation.onRegression`, `divergence`). See [validation](../guides/validation.md#going-back).",
    "Bound": f"{_EVENT} A job has begun to write weights to the pool.",
    "Released": f"{_EVENT} No job writes weights to the pool any more.",
    "ControllerSuperseded": f"{_EVENT} The job's controller had given way to one on a node that is cut off. "
    "It was replaced, so that the new one takes over.",
    "NodeLost": f"{_EVENT} Pods of a node that no longer reports were deleted, to start on others: see "
    "[scheduling](../guides/scheduling.md#nodes-without-power).",
    "NodeUnhealthy": f"{_EVENT} A pod was deleted because its node is cordoned and shows a sign of a fault, "
    "or because training pods avoid the node.",
    "NodeAvoided": f"{_EVENT} Ranks failed on a node again and again, so training pods avoid it: see "
    "[failing nodes](../guides/failing-nodes.md).",
    "NodeAllowed": f"{_EVENT} Training pods may run on a node again: its failures were forgotten, or the "
    "job does not fit on other nodes.",
    "ProfileWritten": f"{_EVENT} A profile requested by annotation is complete; see `status.profiles`.",
    "ProfileFailed": f"{_EVENT} A profile was refused or not recorded; the message says why.",
    "ExportWritten": f"{_EVENT} An export requested by annotation is complete; see `status.export`.",
    "ExportFailed": f"{_EVENT} An export was refused or not written; the message says why.",
    "GpuSick": f"{_EVENT} A GPU of the node is sick: the job's pods there are replaced. After two strikes "
    "the node is in quarantine: see [GPU health](../guides/gpu-health.md).",
    "StragglerReplaced": f"{_EVENT} The pods on the node of a straggler are replaced, because of "
    "`restartPolicy.stragglers.replace`.",
    "GpuSickNotReplaced": f"{_EVENT} A GPU is sick, but too many nodes have strikes already. Look at GPUs "
    "and agents, or raise `gpuHealth.maxNodesPercent` of the chart.",
}
_HEAD = """# Conditions and reasons

`kubectl describe` shows the conditions of a GRPOJob or RolloutPool and its latest events. `status.phase` of a
job is one of {phases}. While no other reason applies, the reason of a condition is the phase; the message
then says what the job does. More symptoms: [troubleshooting](../guides/troubleshooting.md).

## Types

{types}
## Reasons

{reasons}"""


def conditions_page() -> str:
    """Return the page. Raises ValueError when the texts do not match the code."""
    types, reasons = _from_code()
    _compare("condition type", types, set(_TYPES))
    _compare("reason", reasons, set(_REASONS))
    return _HEAD.format(
        phases=", ".join(phase.value for phase in Phase),
        types=table(("type", "true when"), ((f"`{name}`", text) for name, text in _TYPES.items())),
        reasons=table(
            ("reason", "meaning and remedy"), ((f"`{name}`", text) for name, text in _REASONS.items())
        ),
    )


def _from_code() -> tuple[set[str], set[str]]:
    """Return the condition types and the reasons, without the phases, in the operator's code."""
    types: set[str] = set()
    reasons: set[str] = set()
    for file in sorted(_OPERATOR.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                types.update(_types_of(node))
                reasons.update(_reasons_of(node))
            elif isinstance(node, ast.Assign) and _is_name(node.targets[0], "reason"):
                reasons.update(strings(node.value))
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):  # (reason, message)
                first = node.value.elts[:1]
                reasons.update(text for item in first for text in strings(item) if text[:1].isupper())
    phases = {phase.value for phase in Phase}
    return types, {reason for reason in reasons if reason.isidentifier()} - phases


def _types_of(call: ast.Call) -> list[str]:
    return strings(call.args[0]) if called(call) == "set" and len(call.args) > 2 else []


def _reasons_of(call: ast.Call) -> Iterator[str]:
    name = called(call)
    if name in _CALLS and len(call.args) > _CALLS[name]:
        yield from strings(call.args[_CALLS[name]])


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _compare(kind: str, code: set[str], texts: set[str]) -> None:
    if code != texts:
        raise ValueError(
            f"{kind}: without a text: {sorted(code - texts)}; not in the code: {sorted(texts - code)}: "
            f"correct {__name__}"
        )
