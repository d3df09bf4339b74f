"""Writes of replicas in an audit log. integration/test_leader.py reads a real one."""

import json
from typing import Any

import pytest

from support.replica_writes import duplicates, taken_over, writes_of

USER = "system:serviceaccount:grpo-replicas:ops"
JOB, CONFIG = ("grpojobs", "status", "run"), ("configmaps", "", "run-job")


def line(
    second: int, by: str, about: tuple[str, str, str], verb: str = "patch", code: int = 200,
    sent: dict[str, Any] | None = None, generation: int | None = None, user: str = USER,
) -> str:  # fmt: skip
    resource, subresource, name = about
    event: dict[str, Any] = {
        "requestReceivedTimestamp": f"2026-11-28T10:00:{second:02}.000001Z",
        "user": {"username": user, "extra": {"authentication.kubernetes.io/credential-id": [by]}},
        "verb": verb,
        "objectRef": {"resource": resource, "namespace": "default", "name": name},
        "responseStatus": {"code": code},
    }
    event["objectRef"] |= {"subresource": subresource} if subresource else {}
    event |= {"requestObject": sent} if sent else {}
    event |= {"responseObject": {"metadata": {"generation": generation}}} if generation else {}
    return json.dumps(event)


def _duplicates(*log: str) -> list[str]:
    return duplicates(writes_of(log, USER))


@pytest.mark.parametrize("about", [CONFIG, ("rayclusters", "", "run")])
def test_an_object_that_both_have_written_is_found(about: tuple[str, str, str]) -> None:
    found = [f"patch {about[0]} default/{about[2]}"]
    assert _duplicates(line(1, "a", about, code=201), line(2, "b", about)) == found
    assert _duplicates(line(1, "a", about), line(2, "a", about)) == [], "one may correct itself"
    assert _duplicates(line(1, "a", about), line(2, "b", about, verb="delete")) == []
    assert _duplicates(line(1, "a", about), line(2, "b", about, code=409)) == [], "it was not done"
    assert _duplicates(line(1, "a", about), line(2, "b", about, user="other")) == []


def test_another_generation_is_another_write() -> None:
    about = ("rayclusters", "", "run")
    first, again = line(1, "a", about, generation=1), line(2, "b", about, generation=1)
    assert _duplicates(first, again) and not _duplicates(first, line(2, "b", about, generation=2))


def test_statuses_and_events_are_told_apart_by_what_they_say() -> None:
    starting, training = ({"status": {"phase": phase}} for phase in ("Starting", "Training"))
    first = line(1, "a", JOB, sent=starting, generation=1)
    assert _duplicates(first, line(2, "b", JOB, sent=starting, generation=1))
    assert not _duplicates(first, line(2, "b", JOB, sent=training, generation=1))
    event = {"involvedObject": {"name": "run"}, "reason": "Started", "message": "it runs"}
    first = line(1, "a", ("events", "", "run.1"), verb="create", code=201, sent=event)
    again = line(2, "b", ("events", "", "run.2"), verb="create", code=201, sent=event)
    other = line(2, "b", ("events", "", "run.2"), verb="create", code=201, sent=event | {"reason": "x"})
    assert _duplicates(first, again) == ["create events default/"] and not _duplicates(first, other)


def test_a_replica_takes_over_when_it_writes_the_lease_first() -> None:
    lease = ("leases", "", "grpo-operator-all")
    log = [line(9, "b", lease), line(1, "a", lease), line(4, "b", lease, code=409), line(6, "b", lease)]
    log.append(line(2, "b", lease, verb="get"))
    writes = writes_of(log, USER)
    assert [write.at.second for write in writes] == [1, 4, 6, 9]
    assert taken_over(writes, "b").second == 6
    assert duplicates(writes) == [], "both renew it in turn"
