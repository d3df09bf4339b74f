"""Writes of an operator's replicas, as the API server's audit log shows them (pure)."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

_TOKEN = "authentication.kubernetes.io/credential-id"
_WRITES = ("create", "update", "patch", "delete")


class Write(NamedTuple):
    """One request that writes. ``by``: id of the replica's token. ``about``: kind, namespace and name.

    ``generation``: of the object as it was written, if it has one. ``content``: of statuses
    and events, of which an object gets several; else "".
    """

    at: datetime
    by: str
    verb: str
    about: str
    generation: int | None
    content: str
    code: int

    @property
    def done(self) -> bool:
        """Return whether the API server did it."""
        return self.code < 400

    @property
    def of_lease(self) -> bool:
        """Return whether it belongs to the election of the leader."""
        return self.about.startswith("leases ")


def writes_of(log: Iterable[str], user: str) -> list[Write]:
    """Return the answered writes of an account in their order. ``log``: lines of the audit log."""
    return sorted(_writes(log, user), key=lambda write: write.at)


def duplicates(writes: Iterable[Write]) -> list[str]:
    """Return what two replicas have done to the same object in the same generation, with the same verb."""
    replicas: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for write in writes:
        if write.done and not write.of_lease:
            replicas[write.verb, write.about, write.generation, write.content].add(write.by)
    return sorted(f"{key[0]} {key[1]}" for key, by in replicas.items() if len(by) > 1)


def taken_over(writes: Iterable[Write], by: str) -> datetime:
    """Return when a replica has first written the lease, which only a leader can."""
    return min(write.at for write in writes if write.of_lease and write.done and write.by == by)


def _writes(log: Iterable[str], user: str) -> Iterator[Write]:
    for line in log:
        event = json.loads(line)
        code = event.get("responseStatus", {}).get("code")
        if event["user"]["username"] == user and event["verb"] in _WRITES and code:
            yield Write(
                datetime.fromisoformat(event["requestReceivedTimestamp"]),
                event["user"]["extra"][_TOKEN][0],
                event["verb"],
                _about(event),
                (event.get("responseObject") or {}).get("metadata", {}).get("generation"),
                _content(event),
                code,
            )


def _about(event: dict[str, Any]) -> str:
    about = event["objectRef"]
    kind = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    name = "" if kind == "events" else about.get("name", "")  # the API server makes the names of events up
    return f"{kind} {about.get('namespace', '')}/{name}"


def _content(event: dict[str, Any]) -> str:
    """Return what tells this write from others to the same object, or to an object without a name."""
    about, sent = event["objectRef"], event.get("requestObject") or {}
    if about.get("subresource") == "status":
        return json.dumps(sent.get("status"), sort_keys=True)
    if about["resource"] == "events":
        return json.dumps([sent[key] for key in ("involvedObject", "reason", "message")], sort_keys=True)
    return ""
