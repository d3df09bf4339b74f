"""Time until a job ends (pure)."""

from grpo_operator.api.messages import ControllerStatus


def remaining(total_steps: int, controller: ControllerStatus | None) -> str | None:
    """Return the time that the missing steps take at the pace of the last one, as in ``2h05m``."""
    if controller is None or controller.step_seconds is None:
        return None
    seconds = max(total_steps - controller.step, 0) * controller.step_seconds
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m"
