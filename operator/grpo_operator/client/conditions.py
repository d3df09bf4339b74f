"""What the conditions of a job say (pure)."""

from typing import Any


def message_of(status: dict[str, Any]) -> str:
    """Return the message of the condition that matters most now, or ""."""
    true = {c["type"]: c.get("message") for c in status.get("conditions") or [] if c.get("status") == "True"}
    kinds = ("Failed", "Stalled", "Degraded", "Reconciling", "Progressing")
    return next((str(true[kind]) for kind in kinds if true.get(kind)), "")
