"""Curves of the validation sets on a page: points of validation.jsonl, a bounded number of them."""

import json
import math
from pathlib import Path
from typing import Any

from upath import UPath

from grpo_worker.checkpointing.best import Best
from grpo_worker.common.log_pieces import LogPieces
from grpo_worker.common.step_log import StepLog
from grpo_worker.common.store_path import JobFolder
from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.records import new_validations, validation_records
from grpo_worker.run_page.snapshot import Run, snapshot
from grpo_worker.run_page.validations import validations
from support.run_pages import validations_of, write_records, write_validations


def _points(found: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """Return the points of a page's validations by set and measure."""
    return {
        one["name"]: {curve["name"]: [list(point) for point in curve["points"]] for curve in one["curves"]}
        for one in found["sets"]
    }


def _record(step: int, score: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "set": "gcd", "score/mean": score, "score/ci95": 0.125} | more


def test_every_point_is_one_of_the_file(tmp_path: Path) -> None:
    write_records(tmp_path, range(1, 41))
    write_validations(tmp_path, range(0, 41, 4), Best(32, "math-500"))
    found = snapshot(Run("job", JobFolder(tmp_path, tmp_path)))["validation"]
    assert _points(found) == validations_of(tmp_path)
    assert list(_points(found)["aime"]) == ["score", "pass@1", "pass@2", "pass@4", "pass@8"]
    assert (found["last"], found["width"], found["hidden"]) == (40, 1, 0)
    assert found["kept"] == {"step": 32, "set": "math-500"}


def test_a_job_without_validation_has_no_curves(tmp_path: Path) -> None:
    found = snapshot(Run("job", JobFolder(tmp_path, tmp_path)))["validation"]
    assert found == {"sets": [], "last": -1, "width": 1, "hidden": 0, "kept": None}


def test_a_long_run_keeps_the_extremes_of_every_interval_and_the_kept_checkpoint() -> None:
    records = [_record(step, float(step * 37 % 101)) for step in range(5000)]
    found = validations(records, Best(1234, "gcd"), Limits(validations=50))
    points, width = _points(found)["gcd"]["score"], found["width"]
    assert width == 128 and len(points) <= 2 * 50 + 1
    for first in range(0, 5000, width):
        inside = [record["score/mean"] for record in records[first : first + width]]
        shown = [mean for step, mean, _ in points if first <= step < first + width]
        assert {min(inside), max(inside)} <= set(shown)
    assert [1234, float(1234 * 37 % 101), 0.125] in points
    assert all(records[int(step)]["score/mean"] == mean for step, mean, _ in points)


def test_a_page_is_bounded_whatever_the_file_has() -> None:
    passes = {f"pass@{k}/{part}": 0.5 for k in range(1, 40) for part in ("mean", "ci95")}
    records = [
        _record(step, 0.5, **passes) | {"set": f"set-{number}"}
        for step in range(3000) for number in range(40)
    ]  # fmt: skip
    found = validations(records, None, Limits())
    assert len(found["sets"]) == 16 and found["hidden"] == 24
    assert all(len(one["curves"]) == 13 for one in found["sets"])
    assert len(json.dumps(found)) < 4 << 20


def test_sets_without_scores_and_numbers_that_are_not_finite_have_no_points() -> None:
    refused = {"step": 0, "set": "gcd", "prompts": 0.0, "refused": 5.0}
    records = [refused, _record(2, math.nan), _record(4, 0.5), _record(6, 0.5, **{"score/ci95": math.inf})]
    found = validations(records, None, Limits())
    assert _points(found) == {"gcd": {"score": [[4, 0.5, 0.125]]}} and found["last"] == 6
    json.dumps(validations(records[:2], None, Limits()), allow_nan=False)


def test_new_validations_are_whole_and_bounded(tmp_path: Path) -> None:
    folder, log = JobFolder(tmp_path, tmp_path), StepLog(tmp_path / "validation.jsonl")
    assert new_validations(folder, -1) == [] and new_validations(folder, 3) is None
    for step in range(0, 40, 2):
        log.append(step, [{"set": name, "filler": "x" * 30000} for name in ("a", "b")])
    log.flush()
    found = new_validations(folder, 3)
    assert found is not None and len(found) == 2 * 17, "1 MiB at most"
    assert [one["step"] for one in found[:4]] == [4, 4, 6, 6] and [one["set"] for one in found[:2]] == [
        "a",
        "b",
    ]
    assert new_validations(folder, 38) == [] and new_validations(folder, 40) is None
    log.truncate(-1)
    assert new_validations(folder, 38) is None and new_validations(folder, -1) == []


def test_the_initial_weights_are_in_an_object_store_too(tmp_path: Path) -> None:
    store = UPath(f"memory:/{tmp_path}/job")
    for disk, step in (("lost", 0), ("new", 4)):
        (tmp_path / disk).mkdir()
        log = StepLog(tmp_path / disk / "validation.jsonl", pieces=store)
        log.append(step, [_record(step, 0.5)])
        log.flush()
    folder = JobFolder(store, tmp_path / "new")
    assert LogPieces(store / "validation.jsonl").last == 4
    assert [one["step"] for one in validation_records(folder)] == [0, 4]
    (tmp_path / "empty").mkdir()
    assert new_validations(JobFolder(store, tmp_path / "empty"), 4) == []
