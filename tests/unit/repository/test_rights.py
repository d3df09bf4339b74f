"""Comparison of audit logs with the operator's rights. integration/test_rights.py reads a real log."""

import json
from typing import Any

from grpo_devcluster.rights import Right, granted, refused, used

USER = "system:serviceaccount:grpo-system:ops"
POD, STATUS = Right("", "pods", "list"), Right("rl.grpo.dev", "grpojobs/status", "patch")


def line(right: Right, code: int = 200, user: str = USER) -> str:
    resource, _, subresource = right.resource.partition("/")
    about: dict[str, Any] = {"resource": resource}
    about |= {"apiGroup": right.group} if right.group else {}
    about |= {"subresource": subresource} if subresource else {}
    event = {"user": {"username": user}, "verb": right.verb, "objectRef": about}
    return json.dumps(event | {"responseStatus": {"code": code}})


def test_a_right_is_used_by_a_request_that_the_api_server_let_pass() -> None:
    log = [line(POD), line(STATUS, 409), line(Right("", "secrets", "list"), 403), line(POD, user="other")]
    assert used(log, USER) == {POD, STATUS}
    assert refused(log, USER) == {Right("", "secrets", "list")}
    assert used(log, "nobody") == set()


def test_an_apply_that_creates_its_object_uses_both_verbs() -> None:
    apply = Right("", "configmaps", "patch")
    assert used([line(apply)], USER) == {apply}
    assert used([line(apply, 201)], USER) == {apply, apply._replace(verb="create")}


def test_a_namespace_that_is_being_deleted_refuses_no_right() -> None:
    event = json.loads(line(Right("", "configmaps", "patch"), 403))
    event["responseStatus"]["details"] = {"causes": [{"reason": "NamespaceTerminating"}]}
    assert refused([json.dumps(event)], USER) == set()
    event["responseStatus"]["details"] = {"causes": [{"reason": "FieldValueInvalid"}]}
    assert refused([json.dumps(event)], USER) == {Right("", "configmaps", "patch")}


def test_requests_for_no_resource_and_unanswered_ones_need_no_right() -> None:
    version = {"user": {"username": USER}, "verb": "get", "responseStatus": {"code": 200}}
    unanswered = {"user": {"username": USER}, "verb": "get", "objectRef": {"resource": "pods"}}
    assert used(map(json.dumps, (version, unanswered)), USER) == set()


def test_rights_are_those_of_all_rules_of_roles() -> None:
    rule = {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["list", "watch"]}
    role = {"kind": "Role", "rules": [rule]}
    found = granted([role, {"kind": "ServiceAccount"}])
    assert found == {Right("", kind, verb) for kind in ("pods", "nodes") for verb in ("list", "watch")}
    assert str(STATUS) == "patch grpojobs/status.rl.grpo.dev" and str(POD) == "list pods"
