"""The page of faults and its figures agree with the markers of the tests."""

import json
from pathlib import Path

import pytest

from grpo_devcluster.reference import faults
from grpo_devcluster.reference.fault_rows import ROWS
from grpo_devcluster.reference.faults import FaultTest, fault_tests, faults_page, rows_ok
from grpo_devcluster.results import RESULTS

WHOLE = FaultTest("1", "SIGKILL", "tests/e2e/test_x.py::test_y", "e2e", "gone", "5 s", "bitwise")


def test_the_figures_are_those_of_the_markers() -> None:
    figures = json.loads((RESULTS / "reliability.json").read_text())["figures"]
    assert (figures["fault_rows_ok"], figures["fault_rows"]) == (len(rows_ok(fault_tests())), len(ROWS))


def test_recorded_passes_are_those_of_tests_with_markers() -> None:
    file = RESULTS / "faults.json"
    passed = json.loads(file.read_text())["cases"] if file.is_file() else {}
    assert passed.keys() <= {test.test for test in fault_tests()}


def test_the_page_names_every_row_and_every_test() -> None:
    page, tests = faults_page(), fault_tests()
    assert all(f"| {row} | {text} |" in page for row, text in ROWS.items())
    assert len(tests) > 50 and all(f"[{test.test.partition('::')[2]}](" in page for test in tests)
    missing = [row for row in ROWS if row not in {test.row for test in tests}]
    assert page.count("**not tested**") == len(missing) and f"Not tested: {len(missing)}." in page


@pytest.mark.parametrize(
    "changes",
    [{"witness": ""}, {"bound": ""}, {"compared": ""}, {"partial": "one engine"}, {"level": "unit"}],
)
def test_a_row_is_shown_only_by_a_test_that_has_everything(changes: dict[str, str]) -> None:
    values = {name: getattr(WHOLE, name) for name in FaultTest.__slots__}
    assert rows_ok([WHOLE]) == ["1"]
    assert rows_ok([FaultTest(**values | changes)]) == []


def _markers(folder: Path, text: str) -> list[FaultTest]:
    (folder / "worker").mkdir(parents=True)
    (folder / "worker" / "test_x.py").write_text(f"import pytest\n\n{text}\ndef test_y() -> None: ...\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "_TESTS", folder)
        patch.setattr(faults, "REPO", folder)
        return fault_tests()


def test_a_marker_becomes_one_test_of_each_row(tmp_path: Path) -> None:
    marker = '@pytest.mark.slow\n@pytest.mark.fault(row="3, 2", point="a" "b", bound="5 s")'
    found = [(test.row, test.point, test.level, test.bound) for test in _markers(tmp_path, marker)]
    assert found == [("2", "ab", "worker, slow", "5 s"), ("3", "ab", "worker, slow", "5 s")]


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ('@pytest.mark.fault(row="99", point="a")', "unknown rows"),
        ('@pytest.mark.fault(row="1")', "takes row and point"),
        ('@pytest.mark.fault(row="1", point="a", limit="5 s")', "takes row and point"),
    ],
)
def test_a_wrong_marker_is_refused(tmp_path: Path, marker: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        _markers(tmp_path, marker)
