"""Completion of ``kubectl grpo``, in the form that kubectl reads."""

import os
import sys
from pathlib import Path

import pytest

from grpo_operator.cli.kubectl import complete
from grpo_operator.cli.kubectl import main as plugin

_KUBECTL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *get-contexts*) echo dev; echo prod;;
  *namespaces*) echo namespace/rl; echo namespace/other;;
  *--namespace=broken*) echo no rights >&2; exit 1;;
  *) echo grpojob.rl.grpo.dev/tiny-moe; echo grpojob.rl.grpo.dev/qwen3;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace kubectl by a program that knows two jobs; return the file with its calls."""
    program, log = tmp_path / "kubectl", tmp_path / "calls"
    program.write_text(_KUBECTL.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("KUBECTL", str(program))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return log


def _completed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    complete.main(words)
    *found, directive = [line for line in capsys.readouterr().out.splitlines() if line]
    return found, directive


def test_commands_have_descriptions(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, directive = _completed(capsys, "")
    described = dict(line.split("\t") for line in found)
    assert directive == ":4" and all(described.values())
    assert described.keys() == {
        "status", "events", "logs", "metrics", "samples", "ui", "suspend", "resume", "fork", "doctor",
        "export", "profile", "serve", "plan", "rehearse", "convert",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "found", "directive"),
    [
        (("sus",), ["suspend"], 4),
        (("status", ""), ["tiny-moe", "qwen3"], 4),
        (("status", "t"), ["tiny-moe"], 4),
        (("logs", "tiny-moe", "--fo"), ["--follow"], 4),
        (("logs", "tiny-moe", "--part", "tr"), ["trainer", "trainer-agent"], 4),
        (("fork", ""), ["tiny-moe", "qwen3"], 4),
        (("status", "-n", ""), ["rl", "other"], 4),
        (("status", "--context", "p"), ["prod"], 4),
        (("status", "-n", "broken", ""), [], 4),
        (("plan", ""), [], 0),
        (("convert", "--rows", "7", ""), [], 0),
        (("ui", "tiny-moe", "-o", ""), [], 0),
        (("status", "--kubeconfig", ""), [], 0),
    ],
)
def test_words_are_completed(
    calls: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], found: list[str], directive: int
) -> None:
    lines, end = _completed(capsys, *words)
    assert [line.partition("\t")[0] for line in lines] == found and end == f":{directive}"


def test_names_are_those_of_the_chosen_cluster(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _completed(capsys, "status", "-n", "rl", "--context=dev", "--kubeconfig", "/k", "")
    (call,) = calls.read_text().splitlines()
    assert call.split()[:3] == ["--namespace=rl", "--context=dev", "--kubeconfig=/k"]


def test_the_plugin_itself_can_be_asked(
    calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installations by krew have no second program."""
    monkeypatch.setattr(sys, "argv", ["kubectl-grpo", "__complete", "sus"])
    plugin.main()
    assert capsys.readouterr().out.split("\t")[0] == "suspend"
