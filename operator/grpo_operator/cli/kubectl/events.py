"""Events that concern a job (pure)."""

from collections.abc import Iterable
from typing import Any


def of_job(events: Iterable[dict[str, Any]], job: str) -> list[dict[str, Any]]:
    """Return the events of a job and of the objects that are named after it, the last one at the end."""
    names = (each for each in events if _concerns(str(each["involvedObject"].get("name", "")), job))
    return sorted(names, key=_time)


def lines(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each event: time, object, reason and message."""
    return [_line(event) for event in events]


def _concerns(name: str, job: str) -> bool:
    return name == job or name.startswith(f"{job}-")


def _time(event: dict[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _line(event: dict[str, Any]) -> str:
    about = event["involvedObject"]
    count = event.get("count") or 1
    again = f" (x{count})" if count > 1 else ""
    name = f"{about['kind'].lower()}/{about['name']}"
    message = " ".join(str(event.get("message", "")).split())
    return f"{_time(event)[:19]}Z  {name}  {event.get('reason', '')}{again}: {message}"
