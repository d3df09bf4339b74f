"""Rights of the operator: granted by the chart, and used as the API server's audit log shows (pure)."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple


class Right(NamedTuple):
    """One verb on one kind. ``resource``: plural name, with a subresource as in ``pods/status``."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def granted(objects: Iterable[dict[str, Any]]) -> set[Right]:
    """Return the rights in the roles among some objects."""
    return {
        Right(group, resource, verb)
        for role in objects
        if role["kind"] in ("ClusterRole", "Role")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(log: Iterable[str], user: str) -> set[Right]:
    """Return the rights that requests of a user needed and had. ``log``: lines of the audit log.

    A patch that answers 201 is a server-side apply that created its object, which needs both verbs.
    """
    rights: set[Right] = set()
    for event in _answered(log, user):
        code = event["responseStatus"]["code"]
        if code == 403:
            continue
        right = _right(event)
        rights.add(right)
        if right.verb == "patch" and code == 201:
            rights.add(right._replace(verb="create"))
    return rights


def refused(log: Iterable[str], user: str) -> set[Right]:
    """Return the rights that a user lacked.

    A namespace that is being deleted takes new objects from nobody, which no right changes.
    """
    answered = ((event, event["responseStatus"]) for event in _answered(log, user))
    return {_right(event) for event, status in answered if status["code"] == 403 and not _ends(status)}


def _answered(log: Iterable[str], user: str) -> Iterable[dict[str, Any]]:
    for line in log:
        event = json.loads(line)
        of_resource = "resource" in event.get("objectRef", {})
        if event["user"]["username"] == user and of_resource and event.get("responseStatus", {}).get("code"):
            yield event


def _ends(status: dict[str, Any]) -> bool:
    """Return whether an answer says that the namespace is being deleted."""
    causes = (status.get("details") or {}).get("causes") or ()
    return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)


def _right(event: dict[str, Any]) -> Right:
    about = event["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    return Right(about.get("apiGroup", ""), resource, event["verb"])
