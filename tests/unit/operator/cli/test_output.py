"""Commands of ``kubectl grpo`` print their results as JSON and YAML, and nothing else beside them."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.cli.kubectl import main as plugin
from support.objects import job

# Keeps one job in a file. A request by annotation has ended when the job is read next.
_KUBECTL = """#!{python} -IS
import json, pathlib, sys
store, words = pathlib.Path({store!r}), sys.argv[1:]
(store.parent / "calls").open("a").write(words[0] + "\\n")
kept = json.loads(store.read_text())
answer, message = kept, ""
if words[:2] == ["get", "events"]:
    about = {{"kind": "Pod", "name": "tiny-moe-trainer-0"}}
    event = {{"involvedObject": about, "lastTimestamp": "2026-01-02T00:00:00Z", "reason": "Killing"}}
    answer = {{"items": [event]}}
elif words[0] == "patch":
    change, message = json.loads(words[words.index("-p") + 1]), "patched"
    kept["spec"].update(change.get("spec", {{}}))
    for name, text in change.get("metadata", {{}}).get("annotations", {{}}).items():
        ended = {{"request": text, "state": kept["ends"], "path": "/store/x", "message": "no room"}}
        profile = ended | {{"id": "a1", "files": ["one.json", "two.json"]}}
        kept["status"].update({{"export": ended}} if name.endswith("/export") else {{"profiles": [profile]}})
    store.write_text(json.dumps(kept))
elif words[0] == "create":
    answer, message = {{"kind": "GRPOJob", "metadata": {{"name": "second", "uid": "7"}}}}, "created"
print(json.dumps(answer) if "json" in words else message)
"""
Run = Callable[..., tuple[str, str, int]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the plugin and returns its output, errors and exit code."""
    program, store = tmp_path / "kubectl", tmp_path / "job.json"
    program.write_text(_KUBECTL.format(python=sys.executable, store=str(store)))
    program.chmod(0o755)
    monkeypatch.setenv("KUBECTL", str(program))

    def run(*words: str, phase: str = "Training", ends: str = "Written") -> tuple[str, str, int]:
        kept = job(suspend=phase == "Suspended") | {"status": {"phase": phase}, "ends": ends}
        store.write_text(json.dumps(kept))
        monkeypatch.setattr(sys, "argv", ["kubectl-grpo", *words])
        with pytest.raises(SystemExit) as end:
            plugin.main()
        return *capsys.readouterr(), int(end.value.code or 0)

    return run


def _data(run: Run, words: Sequence[str], **given: str) -> dict[str, Any]:
    """Return what a command prints as JSON, which is what it prints as YAML."""
    out, err, code = run(*words, "-o", "json", **given)
    assert (err, code) == ("", 0)
    found = json.loads(out)
    again = yaml.safe_load(run(*words, "--output=yaml", **given)[0])
    assert again.keys() == found.keys()
    return dict(found)


def test_events_are_the_objects_themselves(run: Run) -> None:
    (event,) = _data(run, ["events", "tiny-moe"])["items"]
    assert event["involvedObject"]["name"] == "tiny-moe-trainer-0"
    assert run("events", "tiny-moe")[0] == "2026-01-02T00:00:00Z  pod/tiny-moe-trainer-0  Killing: \n"


@pytest.mark.parametrize(
    ("words", "phase", "expected"),
    [
        (["suspend", "tiny-moe"], "Training", {"suspend": True}),
        (["resume", "tiny-moe"], "Suspended", {"suspend": False}),
        (["resume", "tiny-moe", "--steps=200"], "Succeeded", {"totalSteps": 200}),
    ],
)
def test_a_change_prints_the_changed_job(
    run: Run, words: list[str], phase: str, expected: dict[str, Any]
) -> None:
    found = _data(run, words, phase=phase)
    assert found["kind"] == "GRPOJob" and expected.items() <= found["spec"].items()
    assert run(*words, phase=phase) == ("patched\n", "", 0)


def test_a_fork_prints_the_new_job_or_its_manifest(run: Run, tmp_path: Path) -> None:
    words = ["fork", "tiny-moe", "second", "--step=40", "--set", "trainer.optimizer.lr=5e-7"]
    assert _data(run, words)["metadata"] == {"name": "second", "uid": "7"}, "as the API server made it"
    assert run(*words) == ("created\n", "", 0)
    (tmp_path / "calls").unlink()
    manifest = _data(run, [*words, "--dry-run"])
    assert manifest["spec"]["trainer"]["optimizer"]["lr"] == 5e-7
    text = run(*words, "--dry-run")[0]
    assert text.startswith("apiVersion:") and yaml.safe_load(text).keys() == manifest.keys()
    assert "create" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("words", "request_", "lines"),
    [
        (["export", "tiny-moe", "--step=40"], "step=40 quantization=none at=", ["/store/x"]),
        (["profile", "tiny-moe", "torch"], "torch", ["/store/x/one.json", "/store/x/two.json"]),
    ],
)  # fmt: skip
def test_a_request_prints_its_entry_of_the_status(
    run: Run, words: list[str], request_: str, lines: list[str]
) -> None:
    found = _data(run, words)
    assert found["request"].startswith(request_)
    assert (found["state"], found["path"]) == ("Written", "/store/x")
    assert run(*words)[0].splitlines() == ["patched", *lines]
    assert _data(run, [*words, "--wait=0"]).keys() == {"request"}, "it has no state yet"
    assert run(*words, "--wait=0") == ("patched\n", "", 0)
    for output in ("json", "text"):
        out, err, code = run(*words, "-o", output, ends="Failed")
        assert (out.removeprefix("patched\n"), err, code) == ("", "kubectl grpo: no room\n", 1)


@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["events", "tiny-moe"], ["suspend", "tiny-moe"], ["resume", "tiny-moe"], ["doctor"],
        ["fork", "tiny-moe", "second"], ["export", "tiny-moe"], ["profile", "tiny-moe", "torch"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_format_that_does_not_exist_changes_nothing(run: Run, words: list[str], tmp_path: Path) -> None:
    assert run(*words, "-o", "xml") == ("", "kubectl grpo: --output=xml: write json, yaml or text\n", 1)
    assert not (tmp_path / "calls").exists(), "kubectl is not called"


def test_a_plan_is_printed_by_the_same_option(run: Run) -> None:
    file = str(REPO / "manifests" / "deepseek-v3-512xh100.yaml")
    out, err, code = run("plan", file, "-o", "json")
    (plan,) = json.loads(out)
    assert (plan["name"], err, code) == ("deepseek-v3-grpo", "", 0)
    assert run("plan", file, "--json")[0] == out
    assert yaml.safe_load(run("plan", file, "-o", "yaml")[0]) == [plan]
