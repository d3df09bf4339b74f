"""Page of the faults that tests inject, read from the markers ``fault`` of the tests.

    @pytest.mark.fault(row="2", point="...", witness="...", bound="...", compared="...", partial="...")

``row``: key of fault_rows.ROWS, several separated by commas. ``point``: what is injected, and where.
``witness``: what shows that it fired. ``bound``: limit of detection or recovery. ``compared``: with which
undisturbed run, and what of it. ``partial``: what of the row the test leaves out. A test that lacks one of
the last four leaves it out here too. benchmarks/results/faults.json says which tests have passed, and when.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from grpo_devcluster.paths import REPO
from grpo_devcluster.reference.fault_rows import ROWS
from grpo_devcluster.reference.markdown import table
from grpo_devcluster.results import RESULTS, record

_TESTS = REPO / "tests"
_LEVELS = ("unit", "worker", "integration", "e2e")
_STAND_INS = "unit"  # level without real processes


@dataclass(frozen=True, slots=True)
class FaultTest:
    """A test that injects a fault. ``level``: of the tests, with ``slow`` for those that only it runs."""

    row: str
    point: str
    test: str = ""
    level: str = ""
    witness: str = ""
    bound: str = ""
    compared: str = ""
    partial: str = ""

    @property
    def whole(self) -> bool:
        """Return whether the test shows all of its row, with real processes."""
        shown = self.point and self.witness and self.bound and self.compared
        return bool(shown and not self.partial and not self.level.startswith(_STAND_INS))


def fault_tests() -> list[FaultTest]:
    """Return all tests with the marker, by row and level. Raises ValueError for an unknown row or field."""
    found = [
        test
        for level in _LEVELS
        for file in sorted((_TESTS / level).rglob("test_*.py"))
        for test in _of(file)
    ]
    unknown = {test.row for test in found} - ROWS.keys()
    if unknown:
        raise ValueError(f"fault(row=...): unknown rows {sorted(unknown)}; fault_rows.py has the known ones")
    order = {row: number for number, row in enumerate(ROWS)}
    return sorted(found, key=lambda test: order[test.row])


def rows_ok(tests: list[FaultTest]) -> list[str]:
    """Return the rows of which at least one test shows everything."""
    return [row for row in ROWS if any(test.whole for test in tests if test.row == row)]


def record_rows() -> None:
    """Write the number of rows that are shown to reliability.json, if it has changed."""
    figures = {"fault_rows": len(ROWS), "fault_rows_ok": len(rows_ok(fault_tests()))}
    if not figures.items() <= json.loads((RESULTS / "reliability.json").read_text())["figures"].items():
        record("reliability", figures)


def _of(file: Path) -> Iterator[FaultTest]:
    tree = ast.parse(file.read_text())
    module_slow = any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and _names_slow(node.value)
        for node in tree.body
    )
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        slow = module_slow or any(_names_slow(decorator) for decorator in node.decorator_list)
        level = file.relative_to(_TESTS).parts[0] + (", slow" if slow else "")
        for call in (d for d in node.decorator_list if isinstance(d, ast.Call)):
            if ast.unparse(call.func) == "pytest.mark.fault":
                texts = _texts(call, f"{file.name}::{node.name}")
                path = f"{file.relative_to(REPO)}::{node.name}"
                for row in texts.pop("row").split(","):
                    yield FaultTest(row=row.strip(), test=path, level=level, **texts)


def _names_slow(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "slow" for part in ast.walk(node))


def _texts(call: ast.Call, test: str) -> dict[str, str]:
    allowed = {field.name for field in fields(FaultTest)} - {"test", "level"}
    texts = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    if call.args or not {"row", "point"} <= texts.keys() <= allowed:
        raise ValueError(f"{test}: fault() takes row and point, and of {sorted(allowed)} what the test has")
    return texts


_HEAD = """# Faults

Which faults the tests inject, and what each test shows. The table is generated from the tests' markers. A
row is *shown* if one test with real processes injects the whole fault, has a witness that it fired, bounds
detection or recovery, and compares the outcome with an undisturbed run. *In parts*: there are tests, but none
has all of that. Levels and targets: [testing](../development/testing.md); what happens in each case:
[recovery](../concepts/recovery.md). All of them run on CPUs. *Passed* is the day and commit of the last run
that was recorded (`GRPO_RECORD_PASSES=1`): {passed} of {count} tests have one.

Shown: {ok} of {all} rows. In parts: {parts}. Not tested: {missing}.

## Rows

{rows}
## Tests

A cell without text says that the test has no such thing. *Not shown* is what of the row the test leaves out.

{tests}"""


def faults_page() -> str:
    """Return the page."""
    tests = fault_tests()
    ok, touched, passes = set(rows_ok(tests)), {test.row for test in tests}, _passes()
    names = {test.test for test in tests}

    def state(row: str) -> str:
        return "shown" if row in ok else "in parts" if row in touched else "**not tested**"

    rows = [(row, text, state(row), str(sum(t.row == row for t in tests))) for row, text in ROWS.items()]
    lines = [
        (
            t.row,
            t.point,
            t.level,
            t.witness,
            t.bound,
            t.compared,
            t.partial,
            _last_pass(passes.get(t.test)),
            f"[{t.test.partition('::')[2]}]({_link(t)})",
        )
        for t in tests
    ]
    return _HEAD.format(
        ok=len(ok), all=len(ROWS), parts=len(touched - ok), missing=len(ROWS.keys() - touched),
        passed=len(names & passes.keys()), count=len(names),
        rows=table(("row", "fault", "state", "tests"), rows),
        tests=table(
            ("row", "injected", "level", "witness", "bound", "compared with", "not shown", "passed", "test"),
            lines,
        ),
    )  # fmt: skip


def _passes() -> dict[str, dict[str, str]]:
    """Return commit, date and machine of the recorded runs of tests that have passed, by test."""
    file = RESULTS / "faults.json"
    return dict(json.loads(file.read_text())["of"]) if file.is_file() else {}


def _last_pass(of: dict[str, str] | None) -> str:
    return f"{of['date']}, {of['commit']}" if of else ""


def _link(test: FaultTest) -> str:
    return "../../" + test.test.partition("::")[0]
