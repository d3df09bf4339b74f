"""``kubectl grpo`` as users call it, against a real API server."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import KUBECONFIG, REPO
from support.api_server import WHOLE, Api, lose_controller, running, until


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """Return a folder for the PATH with kubectl and the plugin, as pip installs it."""
    (tmp_path / "kubectl").symlink_to(binary("kubectl"))
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ("kubectl-grpo", "kubectl_complete-grpo"):
        module = scripts[name].partition(":")[0]
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        script.chmod(0o755)
    return tmp_path


def _grpo(plugin: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _kubectl(plugin, "grpo", *arguments)


def _kubectl(plugin: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{plugin}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "KUBECONFIG": str(KUBECONFIG)}
    command = [str(plugin / "kubectl"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _ok(plugin: Path, *arguments: str) -> str:
    done = _grpo(plugin, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_is_looked_at_suspended_resumed_and_forked(
    api: Api, plugin: Path, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    shown = _ok(plugin, "status", "tiny-moe", "-n", "default")
    assert "Starting" in shown and "0/120" in shown and "tiny-moe-rollout" in shown
    assert "raycluster/tiny-moe" in _ok(plugin, "events", "tiny-moe")
    found = json.loads(_ok(plugin, "status", "-A", "-o", "json"))
    assert [item["metadata"]["name"] for item in found["items"]] == ["tiny-moe"]
    assert json.loads(_ok(plugin, "suspend", "tiny-moe", "-o", "json"))["spec"]["suspend"] is True
    lose_controller(api, "tiny-moe")  # KWOK's pods answer nothing
    until("Suspended", lambda: "Suspended" in _ok(plugin, "status"), 60)
    api.ok("uncordon", "fake-0", "fake-1")
    _ok(plugin, "resume", "tiny-moe")
    until("all pods run again", lambda: running(api) == WHOLE, 60)
    fork = ("fork", "tiny-moe", "second", "--step", "7", "--set", "trainer.optimizer.lr=5e-7")
    assert json.loads(_ok(plugin, *fork, "-o", "json"))["metadata"]["name"] == "second"
    until("it waits for the checkpoint", lambda: "WaitingForCheckpoint" in _ok(plugin, "status"), 30)
    assert api.get("grpojob", "second")["spec"]["trainer"]["optimizer"]["lr"] == 5e-7


def test_errors_name_what_is_wrong_and_leave_everything_as_it_is(
    api: Api, plugin: Path, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    for arguments, text in (
        (("status", "nobody"), '"nobody" not found'),
        (("resume", "tiny-moe"), "its phase is Starting"),
        (("fork", "tiny-moe", "second", "--set", "seed"), "PATH=VALUE"),
        (("fork", "tiny-moe", "second", "--set", "totalSteps=0"), "totalSteps"),
        (("status", "-o", "xml"), "json, yaml or text"),
    ):
        done = _grpo(plugin, *arguments)
        assert done.returncode == 1 and text in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert not api.exists("grpojob", "second")


def test_kubectl_completes_commands_and_names(api: Api, plugin: Path, tiny: dict[str, Any]) -> None:
    """``kubectl __complete`` is what shells call for a press of the tabulator."""
    tiny["spec"]["suspend"] = True
    assert api.apply(tiny).returncode == 0

    def completed(*words: str) -> tuple[list[str], str]:
        done = _kubectl(plugin, "__complete", "grpo", *words)
        assert done.returncode == 0, done.stderr
        *found, directive = done.stdout.splitlines()
        return [line.partition("\t")[0] for line in found], directive

    commands, directive = completed("")
    assert {"status", "logs", "plan", "doctor"} <= set(commands) and directive == ":4"
    assert completed("sta") == (["status"], ":4")
    assert completed("status", "") == (["tiny-moe"], ":4")
    assert completed("logs", "-n", "kube-system", "") == ([], ":4")
    assert "kube-system" in completed("status", "--namespace", "")[0]
    assert completed("plan", "") == ([], ":0"), "files"


def test_doctor_finds_what_a_cluster_lacks(api: Api, plugin: Path, fake_nodes: Any) -> None:
    fake_nodes(2)
    done = _grpo(plugin, "doctor")
    found = {line[6:].split(":")[0]: line[:4].strip() for line in done.stdout.splitlines()}
    # The operator and KubeRay run as processes of this machine here, without Deployments.
    assert found == {
        "API server": "ok", "CRDs": "ok", "KubeRay": "FAIL", "operator": "FAIL", "your rights": "ok",
        "GPUs": "ok", "jobs": "ok",
    }  # fmt: skip
    assert "16 on 2 of 2 nodes" in done.stdout and done.returncode == 1
