"""GPU time of a job in its status (pure)."""

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.goodput import GoodputStatus
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

_UNUSED = ("replayed", "idle", "spare")


def goodput_status(
    old: GoodputStatus | None, spec: GRPOJobSpec, controller: ControllerStatus | None
) -> GoodputStatus | None:
    """Return the GPU time that the controller reports; without a report, what is known already."""
    if controller is None or not controller.gpu_seconds:
        return old
    seconds, price = controller.gpu_seconds, spec.observability.price_per_gpu_hour
    total = sum(seconds.values())
    cost = None if price is None else total / 3600 * price
    effective = 100 * (1 - sum(seconds.get(use, 0) for use in _UNUSED) / total) if total else None
    return GoodputStatus(
        effective=None if effective is None else f"{effective:.1f}",
        gpu_seconds=seconds,
        lost_gpu_seconds=controller.lost_gpu_seconds,
        cost=None if cost is None else f"{cost:.2f}",
        cost_per_step=f"{cost / controller.step:.4g}" if cost is not None and controller.step else None,
    )
