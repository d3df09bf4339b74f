"""Result files: figures keep their own origin, and tests do not write tracked files."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster import results

EARLIER = {"commit": "abc1234", "date": "2026-01-02", "machine": "2 x GPU"}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "benchmarks")
    monkeypatch.setattr(results, "LOCAL_RESULTS", tmp_path / "build")
    monkeypatch.delenv("GRPO_RECORD", raising=False)


def _content(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_a_run_changes_the_origin_of_its_own_figures_only() -> None:
    results.record("demo", {"a": 1, "b": 2}, EARLIER)
    content = _content(results.record("demo", {"b": 3}))
    assert content["figures"] == {"a": 1, "b": 3} and content["of"]["a"] == EARLIER
    assert content["of"]["b"] == results.stamp() != EARLIER


def test_cases_and_figures_of_a_file_are_kept_side_by_side() -> None:
    results.record_cases("demo", {"steps": [1, 2]}, EARLIER)
    content = _content(results.record("demo", {"a": 1}))
    assert content["cases"] == {"steps": [1, 2]} and content["figures"] == {"a": 1}
    assert content["of"].keys() == {"a", "steps"} and content["of"]["steps"] == EARLIER


def test_a_test_writes_committed_results_only_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results.record_from_test("demo", {"a": 1}) == tmp_path / "build" / "demo.json"
    monkeypatch.setenv("GRPO_RECORD", "1")
    assert results.record_from_test("demo", {"a": 1}) == tmp_path / "benchmarks" / "demo.json"


def test_a_host_without_the_repository_names_the_commit_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "REPO", tmp_path)
    monkeypatch.delenv("GRPO_COMMIT", raising=False)
    assert results.commit_id() == "unknown"
    monkeypatch.setenv("GRPO_COMMIT", "abc1234")
    assert results.stamp("2 x GPU")["commit"] == "abc1234"
