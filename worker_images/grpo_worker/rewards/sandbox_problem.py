"""What the sandbox of programs lacks on this node."""

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.rewards.programs.landlock import landlock_version


def sandbox_problem(spec: RewardSpec | None) -> str:
    """Return what lets programs of ``builtin: code`` read the pod's files, or "" if they cannot."""
    if spec is None or spec.builtin != "code" or landlock_version():
        return ""
    return (
        f"spec.reward.sandbox={spec.sandbox}: the kernel of the controller's node offers no Landlock, so the "
        "programs that the model writes can read the files of the controller's pod"
    )
