"""Times of Kubernetes objects (pure)."""

from datetime import datetime


def seconds_of(time: str) -> float:
    """Return a time of Kubernetes (RFC 3339) in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()
