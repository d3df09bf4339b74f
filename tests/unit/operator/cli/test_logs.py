"""``kubectl grpo logs``: of pods that run, and from the store of pods that are gone."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.names import STORE_MOUNT, job_store, writer
from support.objects import job

# Answers as kubectl does; a program that is to run in a pod runs here, with the store at another place.
_KUBECTL = """#!{python}
import json, subprocess, sys
from pathlib import Path
folder, words = Path({folder!r}), sys.argv[1:]
if words[0] == "get" and words[1] == "pods":
    pool = words[words.index("-l") + 1].rpartition("=")[2]
    pods = [pool] if pool in (folder / "pools").read_text().split() else []
    items = [{{"metadata": {{"name": pod}}, "status": {{"phase": "Running"}}}} for pod in pods]
    print(json.dumps({{"items": items}}))
elif words[0] == "get":
    print((folder / "job.json").read_text())
elif words[0] == "exec":
    assert words[1:4] == ["controller", "-c", "controller"], words
    command = [word.replace({mount!r}, str(folder)) for word in words[words.index("--") + 1 :]]
    sys.exit(subprocess.run(command).returncode)
else:
    print(*words)
"""
Grpo = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def grpo(tmp_path: Path) -> Grpo:
    """Return a call of the plugin for a job. ``pools``: which have pods; ``spec``: fields of the job's."""

    def call(*words: str, pools: str, **spec: Any) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "job.json").write_text(json.dumps(job(**spec)))
        (tmp_path / "pools").write_text(pools)
        program = tmp_path / "kubectl"
        program.write_text(_KUBECTL.format(python=sys.executable, folder=str(tmp_path), mount=STORE_MOUNT))
        program.chmod(0o755)
        command = [sys.executable, "-m", "grpo_operator.cli.kubectl.main", "logs", "tiny-moe", *words]
        environment = os.environ | {"KUBECTL": str(program)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return call


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Return the folder with the log files of the job, in a store below ``tmp_path``."""
    found = job()
    name = job_store(found["metadata"]["namespace"], writer(found)).removeprefix(f"{STORE_MOUNT}/")
    folder = tmp_path / name / "logs"
    folder.mkdir(parents=True)
    for name in ("controller.20261128T100000Z.log", "trainer-3.attempt-1.log", "trainer-3.attempt-2.log",
                 "trainer-30.attempt-2.log", "engine.20261128T100000Z.tiny-moe-a.log",
                 "engine.20261128T100001Z.tiny-moe-b.log",
                 "trainer-agent.20261128T100000Z.tiny-moe-t.log"):  # fmt: skip
        (folder / name).write_text(f"first of {name}\nlast of {name}\n")
    return folder


def test_lines_of_running_pods_come_from_kubectl(grpo: Grpo) -> None:
    done = grpo("-p", "trainer", "-f", pools="controller trainer")
    assert done.stdout.split()[:3] == ["logs", "-l", "rl.grpo.dev/job=tiny-moe,rl.grpo.dev/pool=trainer"]
    assert done.returncode == 0 and {"ray-worker", "-f", "--tail=200"} <= set(done.stdout.split())


def test_lines_of_ranks_that_are_gone_come_from_the_store(grpo: Grpo, logs: Path) -> None:
    done = grpo("-p", "trainer", pools="controller")
    assert done.returncode == 1 and "no pods of trainer now: --stored" in done.stderr, done.stderr
    done = grpo("-p", "trainer", "--stored", "--rank=3", "--tail=1", pools="controller")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line] == [
        "==> trainer-3.attempt-1.log <==", "last of trainer-3.attempt-1.log",
        "==> trainer-3.attempt-2.log <==", "last of trainer-3.attempt-2.log",
    ]  # fmt: skip
    done = grpo("-p", "trainer", "--stored", "--tail=-1", pools="controller")
    assert "first of trainer-3.attempt-1.log" in done.stdout and "trainer-30" in done.stdout
    done = grpo("--stored", pools="controller")
    assert done.stdout.count("==>") == 1 and "first of controller" in done.stdout


def test_lines_of_engines_and_agents_that_are_gone_come_from_the_store(grpo: Grpo, logs: Path) -> None:
    for part in ("engine", "engine-agent"):
        done = grpo("-p", part, "--stored", pools="controller")
        assert re.findall(r"==> (\S+) <==", done.stdout) == [
            "engine.20261128T100000Z.tiny-moe-a.log", "engine.20261128T100001Z.tiny-moe-b.log"
        ]  # fmt: skip
    done = grpo("-p", "engine", "--stored", "--pod=tiny-moe-b", "--tail=1", pools="controller")
    assert done.stdout.splitlines()[1:] == ["last of engine.20261128T100001Z.tiny-moe-b.log"]
    done = grpo("-p", "trainer-agent", "--stored", pools="controller")
    assert re.findall(r"==> (\S+) <==", done.stdout) == ["trainer-agent.20261128T100000Z.tiny-moe-t.log"]


def test_without_a_controller_the_folder_is_named(grpo: Grpo) -> None:
    for words in ([], ["--stored"], ["-p", "trainer"]):
        done = grpo(*words, pools="")
        assert done.returncode == 1, words
        assert f"no running controller: its logs are in {STORE_MOUNT}/default-tiny-moe" in done.stderr


@pytest.mark.parametrize(
    ("words", "store", "text"),
    [
        (("-p", "head"), {"pvc": "checkpoints"}, "--part=head keeps no lines in the store: choose one of"),
        (("--rank=0",), {"pvc": "checkpoints"}, "--rank=0: only --part=trainer has ranks"),
        (("--pod=a",), {"pvc": "checkpoints"}, "--pod=a: files of --part=controller do not have the names"),
        ((), {"uri": "s3://bucket/jobs"}, "checkpoint.store.uri is an object store"),
    ],
)
def test_what_no_store_keeps_is_refused(
    grpo: Grpo, words: tuple[str, ...], store: dict[str, str], text: str
) -> None:
    done = grpo("--stored", *words, pools="controller", checkpoint={"store": store})
    assert done.returncode == 1 and text in done.stderr, done.stderr
