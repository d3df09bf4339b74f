"""``kubectl grpo serve`` exports a checkpoint if needed, and creates a RolloutPool that serves it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_operator.cli.kubectl import main as plugin
from support.objects import job

FOLDER = "/store/default-tiny-moe-12345678/export"
# Keeps one job in a file, and what is created in another one. An export has ended when the job is read next.
_KUBECTL = """#!{python} -IS
import json, pathlib, sys
folder, words = pathlib.Path({folder!r}), sys.argv[1:]
store = folder / "job.json"
kept = json.loads(store.read_text())
answer, message = kept, ""
if words[0] == "patch":
    (text,) = json.loads(words[words.index("-p") + 1])["metadata"]["annotations"].values()
    fields = dict(word.split("=", 1) for word in text.split())
    place = {export!r} + "/checkpoint-" + fields["step"]
    state = {{"request": text, "state": kept["ends"], "step": int(fields["step"]), "path": place}}
    kept["status"]["export"] = state | {{"message": "it exists"}}
    store.write_text(json.dumps(kept))
    message = "patched"
elif words[0] == "create":
    (folder / "created").write_text(sys.stdin.read())
    message = "created"
elif words[:3] == ["get", "rolloutpools.rl.grpo.dev", "shared"]:
    answer = {{"spec": {{"engine": {{"device": "cpu", "contextLength": 512}}}}}}
print(json.dumps(answer) if "json" in words else message)
"""
Run = Callable[..., tuple[str, str, int]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the plugin and returns its output, errors and exit code."""
    program = tmp_path / "kubectl"
    program.write_text(_KUBECTL.format(python=sys.executable, folder=str(tmp_path), export=FOLDER))
    program.chmod(0o755)
    monkeypatch.setenv("KUBECTL", str(program))

    def run(
        *words: str, status: dict[str, Any] | None = None, ends: str = "Written", **spec: Any
    ) -> tuple[str, str, int]:
        found = {"phase": "Succeeded", "lastCheckpoint": {"step": 40}} if status is None else status
        spec = {"checkpoint": {"store": {"pvc": "runs"}}} | spec
        (tmp_path / "job.json").write_text(json.dumps(job(**spec) | {"status": found, "ends": ends}))
        monkeypatch.setattr(sys, "argv", ["kubectl-grpo", "serve", "tiny-moe", *words])
        with pytest.raises(SystemExit) as end:
            plugin.main()
        return *capsys.readouterr(), int(end.value.code or 0)

    return run


def _created(tmp_path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((tmp_path / "created").read_text()))


def _annotation(tmp_path: Path) -> str:
    status = json.loads((tmp_path / "job.json").read_text())["status"]
    return str((status.get("export") or {}).get("request", ""))


def test_the_newest_checkpoint_is_exported_and_served(run: Run, tmp_path: Path) -> None:
    out, err, code = run("--replicas=3")
    assert (err, code) == ("", 0)
    assert out.splitlines()[:2] == ["patched", "created"] and "kubectl get rpool tiny-moe-40" in out
    assert _annotation(tmp_path).startswith("step=40 quantization=none")
    made = _created(tmp_path)
    assert (made["kind"], made["metadata"]["name"], made["spec"]["replicas"]) == (
        "RolloutPool", "tiny-moe-40", 3,
    )  # fmt: skip
    assert made["spec"]["model"]["path"] == "/models/default-tiny-moe-12345678/export/checkpoint-40"


def test_an_export_that_is_there_is_served_as_it_is(run: Run, tmp_path: Path) -> None:
    request = "step=30 quantization=fp8-block128 name=final at=x"
    export = {"request": request, "state": "Written", "step": 30, "path": f"{FOLDER}/final"}
    status = {"lastCheckpoint": {"step": 40}, "export": export}
    assert run("--step=30", "--quantization=fp8-block128", status=status)[2] == 0
    assert _annotation(tmp_path) == request, "no other export is asked for"
    made = _created(tmp_path)
    assert (
        made["spec"]["model"]["path"].endswith("/export/final") and made["metadata"]["name"] == "tiny-moe-30"
    )
    assert made["spec"]["engine"]["quantization"] == "fp8-block128"
    assert run("--step=30", status=status)[2] == 0
    assert _annotation(tmp_path).startswith("step=30 quantization=none"), "the one in bf16 is another one"


def test_a_directory_that_the_job_exported_itself_needs_no_checkpoint(run: Run, tmp_path: Path) -> None:
    assert run("--export=step-00000120", "--name=best", status={})[2] == 0
    assert _annotation(tmp_path) == ""
    made = _created(tmp_path)
    assert made["metadata"]["name"] == "best"
    assert made["spec"]["model"]["path"].endswith("/export/step-00000120")


def test_a_dry_run_prints_the_manifest_and_the_export_to_make_first(run: Run, tmp_path: Path) -> None:
    out, err, code = run("--step=7", "--dry-run", "-o", "yaml")
    assert code == 0 and err == "first: kubectl grpo export tiny-moe --step 7 --quantization none\n"
    assert yaml.safe_load(out)["spec"]["model"]["path"].endswith("/export/checkpoint-7")
    assert json.loads(run("--dry-run", "-o", "json")[0])["metadata"]["name"] == "tiny-moe-40"
    assert not (tmp_path / "created").exists() and _annotation(tmp_path) == ""


def test_a_job_with_a_shared_pool_is_served_by_engines_like_that_pools(run: Run, tmp_path: Path) -> None:
    assert run("--export=x", rollout={"poolRef": {"name": "shared"}})[2] == 0
    assert _created(tmp_path)["spec"]["engine"] == {"device": "cpu", "contextLength": 512}


@pytest.mark.parametrize(
    ("words", "given", "error"),
    [
        ([], {"status": {}}, "tiny-moe has no checkpoint yet: serve it when status.lastCheckpoint is there"),
        ([], {"ends": "Failed"}, "it exists (an export that is there already: --export DIRECTORY)"),
        (["--wait=0"], {}, "the export of step 40 is not complete yet: call this again later"),
        (["--quantization=int3"], {}, "quantization: Input should be"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_creates_no_pool(
    run: Run, tmp_path: Path, words: list[str], given: dict[str, Any], error: str
) -> None:
    out, err, code = run(*words, **given)
    assert code == 1 and error in err, (out, err)
    assert not (tmp_path / "created").exists()
