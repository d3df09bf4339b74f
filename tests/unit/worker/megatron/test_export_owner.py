"""Exports by the program beside those of the job's ranks, in a file system and in an object store."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from upath import UPath

from grpo_worker.checkpointing.exports import CONFIG, complete_exports
from grpo_worker.common.store_path import StorePath, children
from grpo_worker.megatron.export.order import ExportOrder
from grpo_worker.megatron.export.owner import AttemptOwner, ExportOwner, ProgramOwner
from grpo_worker.megatron.export.place import place_of

REQUEST: dict[str, Any] = {
    "folder": "/store/default-tiny-0123abcd",
    "store": {"pvc": "runs"},
    "model": {"path": "preset:tiny-moe"},
    "step": 100,
    "name": "step-100",
}


@pytest.fixture(params=["files", "objects"])
def exports(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    if request.param == "objects":
        return UPath(f"memory://runs{tmp_path}/job/export", use_listings_cache=False)
    (tmp_path / "job" / "export").mkdir(parents=True)
    return tmp_path / "job" / "export"


def _export(target: StorePath, owner: ExportOwner, value: float, completed: bool = True) -> None:
    place = place_of(target, owner)
    place.begin(lambda folder: None)
    place.write(place.file_name(0, 0), {"weight": torch.full((2,), value)})
    if completed:
        place.complete({CONFIG: json.dumps(value)})


def _content(target: StorePath) -> dict[str, bytes]:
    return {name: (target / name).read_bytes() for name in children(target)}


def test_a_program_removes_what_it_left_and_nothing_else(exports: StorePath) -> None:
    job = AttemptOwner(3)
    _export(exports / "step-00000100", job, 1.0)
    _export(exports / "step-00000200", job, 2.0, completed=False)
    _export(exports / "other", ProgramOwner(), 3.0)
    _export(exports / "mine", ProgramOwner(), 4.0, completed=False)
    before = {name: _content(exports / name) for name in children(exports) if not name.startswith("mine")}
    _export(exports / "mine", ProgramOwner(), 5.0)
    assert {name: _content(exports / name) for name in children(exports) if name != "mine"} == before
    assert len(children(exports / "mine")) == 2 and (exports / "mine" / CONFIG).read_text() == "5.0"
    assert complete_exports(exports) == {100}, "the job's own"


def test_a_job_does_not_remove_what_a_program_writes(exports: StorePath) -> None:
    place = place_of(exports / "step-100", ProgramOwner())
    place.begin(lambda folder: None)
    place.write(place.file_name(0, 0), {"weight": torch.ones(2)})
    for attempt in (1, 2):
        _export(exports / "step-00000100", AttemptOwner(attempt), 1.0)
    place.complete({CONFIG: "{}"})
    assert len(children(exports / "step-100")) == 2


def test_a_complete_export_is_not_replaced(exports: StorePath) -> None:
    target = exports / "mine"
    late = place_of(target, ProgramOwner())
    late.begin(lambda folder: None)
    _export(target, ProgramOwner(), 1.0)
    before = _content(target)
    with pytest.raises(FileExistsError, match="mine is a complete export: choose another name, or remove it"):
        place_of(target, ProgramOwner()).begin(lambda folder: None)
    with pytest.raises(OSError, match="mine"):  # in a file system its directory was removed
        late.complete({CONFIG: "{}"})
    late.discard()
    assert _content(target) == before and children(exports) == ["mine"]


def test_a_request_may_come_from_a_newer_operator() -> None:
    request = ExportOrder.parse(json.dumps(REQUEST | {"store": {"pvc": "runs", "tier": 2}, "new": 1}))
    assert (request.store.pvc, request.step, request.quantization) == ("runs", 100, "none")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": -1}, r"request\.step: .* \(got -1\)"),
        ({"quantization": "int4"}, r"request\.quantization: .* \(got 'int4'\)"),
        ({"name": "../step-1"}, r"request\.name: .* \(got '\.\./step-1'\)"),
        ({"name": "step-00000100"}, r"request\.name: .*choose another name, such as step-100"),
        ({"folder": "store"}, r"request\.folder: "),
        ({"store": {}}, "set exactly one of path, pvc and uri"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_by_its_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ExportOrder.parse(json.dumps(REQUEST | changes))
