"""The annotation that asks for a profile: taken once, refused by name, kept by a restarted operator."""

from typing import Any

from support.api_server import WHOLE, Api, Operator, running, until

ANNOTATION = "rl.grpo.dev/profile"


def _annotate(api: Api, value: str) -> None:
    api.ok("annotate", "grpojob", "tiny-moe", f"{ANNOTATION}={value}")


def _profiles(api: Api) -> list[dict[str, Any]]:
    return list((api.get("grpojob", "tiny-moe").get("status") or {}).get("profiles") or [])


def test_each_request_is_taken_once(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, operator: Operator
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    _annotate(api, "torch steps=2")
    (entry,) = until("the request", lambda: _profiles(api))
    assert (entry["state"], entry["tool"], entry["target"]) == ("Requested", "torch", "trainer")
    assert ANNOTATION not in api.get("grpojob", "tiny-moe")["metadata"]["annotations"]
    operator.restart()
    _annotate(api, "torch steps=2")
    until("the second request", lambda: len(_profiles(api)) == 2)
    _annotate(api, "perf")
    until("the third request", lambda: len(_profiles(api)) == 3)
    entries = _profiles(api)
    assert entries[0] == entry and len({entry["id"] for entry in entries}) == 3
    assert entries[2]["state"] == "Failed" and "'perf' is no tool and no target" in entries[2]["message"]
    events = api.ok("get", "events", "--field-selector=reason=ProfileFailed,type=Warning")
    assert "'perf' is no tool" in events
