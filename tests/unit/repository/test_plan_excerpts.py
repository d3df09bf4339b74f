"""README and docs show what grpo-plan prints for their manifests.

An excerpt is an indented block that begins with ``$ grpo-plan MANIFEST``. The output has its lines in the
same order; ``...`` stands for any lines, and a note in parentheses at the end of a line may be left out.
"""

import shlex
from pathlib import Path

import pytest

from grpo_devcluster.paths import REPO
from grpo_operator.cli.plan import main

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
_COMMAND, _INDENT = "    $ grpo-plan ", "    "


def _excerpts(text: str) -> list[tuple[str, list[str]]]:
    """Return the arguments and the shown lines of each excerpt."""
    found: list[tuple[str, list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(_COMMAND):
            found.append((line.removeprefix(_COMMAND), []))
            inside = True
        elif inside and (line.startswith(_INDENT) or not line):
            found[-1][1].append(line.removeprefix(_INDENT).rstrip())
        else:
            inside = False
    return [(command, [line for line in lines if line]) for command, lines in found]


def _check(shown: list[str], printed: list[str]) -> None:
    """Raise AssertionError at the first line that is not printed where the excerpt shows it."""
    rest = iter(printed)
    for line in shown:
        if line.strip() != "...":
            same = any(out == line or out.startswith(line + "  (") for out in rest)
            assert same, f"grpo-plan does not print {line!r} here: run it again"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_excerpts_are_what_grpo_plan_prints(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    for command, shown in _excerpts(page.read_text()):
        assert main(shlex.split(command)) == 0
        _check(shown, capsys.readouterr().out.splitlines())


def test_the_readme_has_an_excerpt_and_a_wrong_line_is_found() -> None:
    ((command, shown),) = _excerpts((REPO / "README.md").read_text())
    assert command == "manifests/deepseek-v3-512xh100.yaml" and len(shown) > 15
    printed = ["a   1", "b   2  (note)", "c"]
    _check(["a   1", "...", "b   2", "c"], printed)
    for wrong in (["a   2"], ["b   2", "a   1"], ["b"], ["c", "c"]):
        with pytest.raises(AssertionError, match="run it again"):
            _check(wrong, printed)
