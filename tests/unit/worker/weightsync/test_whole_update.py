"""One request pauses an engine, gives it a version from its link, and resumes it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_worker.weightsync.protocol.direct_load import LINK_INSTALL, LINK_LOAD, PREFIX
from grpo_worker.weightsync.sglang_plugin import whole_update

WHOLE = ["pause retract", "begin", "update", "end", "resume"]


class Manager:
    """SGLang's manager as the hook sees it; ``fails``: the call that is refused."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.emptied: bool | None = None

    async def pause_generation(self, request: Any) -> None:
        self.calls.append(f"pause {request.mode}")

    async def continue_generation(self, request: Any) -> None:
        self.calls.append("resume")
        self.emptied = request.torch_empty_cache

    def answer(self, call: str) -> tuple[bool, str]:
        self.calls.append(call)
        return call != self.fails, f"{call} of the engine"


class Sessions(Manager):
    """Since SGLang 0.5.23."""

    async def begin_weight_update(self, _: Any) -> tuple[bool, str]:
        return self.answer("begin")

    async def end_weight_update(self, _: Any) -> tuple[bool, str]:
        return self.answer("end")


def updated(manager: Manager, load_format: str | None, empty: bool = False) -> tuple[bool, str]:
    async def original(owner: Manager, obj: Any, request: Any) -> tuple[bool, str]:
        assert owner is manager and obj.load_format == load_format and request == "request"
        return manager.answer("update")

    obj = SimpleNamespace(load_format=load_format, torch_empty_cache=empty)
    return asyncio.run(whole_update.on_update(original, manager, obj, "request"))


@pytest.mark.parametrize("load_format", [f"{LINK_LOAD}60.0", f"{LINK_INSTALL}7"])
def test_a_version_over_a_link_is_one_request(load_format: str) -> None:
    manager = Sessions()
    assert updated(manager, load_format) == (True, "update of the engine")
    assert manager.calls == WHOLE and manager.emptied is False


def test_an_older_engine_has_no_sessions() -> None:
    manager = Manager()
    assert updated(manager, f"{LINK_LOAD}60.0")[0]
    assert manager.calls == ["pause retract", "update", "resume"]


@pytest.mark.parametrize("fails", ["begin", "update", "end"])
def test_an_engine_that_has_not_taken_the_version_stays_paused(fails: str) -> None:
    manager = Sessions(fails)
    success, message = updated(manager, f"{LINK_LOAD}60.0")
    assert not success and f"{fails} of the engine" in message
    assert manager.calls == (WHOLE[:2] if fails == "begin" else WHOLE[:-1])


def test_the_memory_of_the_buffers_is_returned_on_demand() -> None:
    manager = Sessions()
    updated(manager, f"{LINK_LOAD}60.0", empty=True)
    assert manager.emptied is True


@pytest.mark.parametrize("load_format", [None, "flattened_bucket", f'{PREFIX}{{"plan_id":"1"}}'])
def test_other_updates_are_sglangs_own(load_format: str | None) -> None:
    manager = Sessions()
    assert updated(manager, load_format)[0]
    assert manager.calls == ["update"]
