"""Scores of the validation sets, as the controller reports them (pure)."""

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.status import MAX_VALIDATION_SETS, ValidationStatus


def validation_statuses(
    old: list[ValidationStatus] | None, controller: ControllerStatus | None
) -> list[ValidationStatus] | None:
    """Return the scores that the controller knows; without a controller, those known before."""
    if controller is None or not controller.validation:
        return old
    return [
        ValidationStatus(
            set=one.set,
            step=one.step,
            score=f"{one.score:.4g}",
            best_step=one.best_step,
            best_score=f"{one.best_score:.4g}",
        )
        for one in controller.validation[:MAX_VALIDATION_SETS]
    ]
