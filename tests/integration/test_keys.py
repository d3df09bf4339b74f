"""Keys of jobs on the API server: created, mounted where they are needed, and replaced under requests."""

import base64
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from grpo_operator.api.keys import Epochs, secret_data
from grpo_operator.api.names import key_secret, writer
from grpo_worker.common import auth
from grpo_worker.common.auth import headers
from support.api_server import POOL, Api, Operator, until
from support.pod_keys import FILES, agent_process

MASTER, EPOCH = "grpo-agents", "grpo-agents-epoch"
OVERLAP = 5.0  # seconds; 300 by default
ROUTE = "/v1/versions"


@pytest.fixture(scope="module", autouse=True)
def short_overlap(operator: Operator) -> None:
    operator.restart(keys={"overlapSeconds": OVERLAP})


def _content(api: Api, name: str, namespace: str = "default") -> dict[str, str]:
    data = api.get("secret", name, "-n", namespace)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def _sees(pod: dict[str, Any]) -> set[str]:
    """Return the containers of a pod that can read the key."""
    containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    return {c["name"] for c in containers for mount in c["volumeMounts"] if mount["name"] == "key"}


def _mounted(pod: dict[str, Any]) -> set[str]:
    """Return the Secrets of the key's volume."""
    volumes = [v for v in pod["spec"]["volumes"] if v["name"] == "key"]
    return {source["secret"]["name"] for v in volumes for source in v["projected"]["sources"]}


def _pods(api: Api, job: str) -> list[dict[str, Any]]:
    return list(api.get("pods", "-l", f"rl.grpo.dev/job={job}")["items"])


def test_agents_and_controller_share_a_key_of_their_job_across_operator_restarts(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, operator: Operator
) -> None:
    fake_nodes(3)
    assert api.apply(tiny).returncode == 0
    until("its pods", lambda: len(_pods(api, "tiny-moe")) == 6, 60)
    seen = {pod["metadata"]["labels"][POOL]: _sees(pod) for pod in _pods(api, "tiny-moe")}
    assert seen == {"head": set(), "controller": {"controller"}, "trainer": {"agent"}, "rollout": {"agent"}}
    master, epoch = _content(api, MASTER)["key"], _content(api, EPOCH)
    assert len(master) == 64
    operator.restart(keys={"overlapSeconds": OVERLAP})
    assert api.apply(tiny | {"metadata": {"name": "second"}}).returncode == 0
    until("the second's pods", lambda: _pods(api, "second"), 60)
    assert _content(api, MASTER)["key"] == master and _content(api, EPOCH) == epoch
    jobs = [api.get("grpojob", name) for name in ("tiny-moe", "second")]
    keys = [_content(api, key_secret(job)) for job in jobs]
    assert keys == [secret_data(master, job, None) for job in jobs] and keys[0] != keys[1]
    for job in jobs:
        mounted = {n for pod in _pods(api, job["metadata"]["name"]) if _sees(pod) for n in _mounted(pod)}
        assert mounted == {key_secret(job), EPOCH}, "and not the master key"
    gone = key_secret(jobs[1])
    api.ok("delete", "grpojob", "second")
    until("its key is collected", lambda: not api.exists("secret", gone), 60)


class _Mounts:
    """Folders with the Secrets of pods, which a thread updates as kubelet does, each in its own time."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def mount(self, name: str, job: dict[str, Any], late: float) -> dict[str, str]:
        """Return the variables of a pod that sees a changed epoch ``late`` seconds after it was written."""
        folder = self._folder / name
        folder.mkdir()
        for file, value in (_content(self._api, key_secret(job)) | _content(self._api, EPOCH)).items():
            (folder / file).write_text(value)
        thread = threading.Thread(target=self._follow, args=(folder / "epoch", late))
        thread.start()
        self._threads.append(thread)
        return {variable: str(folder / FILES[variable]) for variable in (auth.FILE, auth.EPOCH_FILE)}

    def _follow(self, file: Path, late: float) -> None:
        while not self._stop.wait(0.2):
            epochs = _content(self._api, EPOCH)["epoch"]
            if epochs != file.read_text() and time.time() >= Epochs.read(epochs).since + late:
                file.with_suffix(".new").write_text(epochs)
                file.with_suffix(".new").replace(file)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def mounts(api: Api, tmp_path: Path) -> Iterator[_Mounts]:
    made = _Mounts(api, tmp_path)
    yield made
    made.stop()


@pytest.mark.fault(
    row="key-rotation",
    point="all tokens are replaced while a real agent is called without a pause",
    witness="the old token is refused afterwards",
    bound="60 s",
    compared="answers before: none is refused",
    partial="no weight update is under way",
)
@pytest.mark.slow
def test_an_annotation_replaces_the_tokens_of_running_agents_without_a_refused_call(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, mounts: _Mounts, tmp_path: Path
) -> None:
    """The agents are real processes. Their pods, on KWOK nodes, run none."""
    fake_nodes(3)
    for name in ("tiny-moe", "other"):
        assert api.apply(tiny | {"metadata": {"name": name}}).returncode == 0
    job, other = (_with_pods(api, name) for name in ("tiny-moe", "other"))
    agents = [mounts.mount("late", job, 0.8 * OVERLAP), mounts.mount("of-other", other, 0)]
    caller = mounts.mount("caller", job, 0)
    with agent_process(agents[0], tmp_path) as url, agent_process(agents[1], tmp_path) as of_other:
        with mock.patch.dict(os.environ, caller):
            first, before = headers(), _content(api, EPOCH)
            assert httpx.get(of_other + ROUTE, headers=first).status_code == 401, "the key of another job"
            api.ok("annotate", "secret", EPOCH, "rl.grpo.dev/rotate=leaked", "--overwrite")
            answers = Counter[int]()
            began = time.monotonic()
            while (sent := headers()) == first or not _ended(api):
                answers[httpx.get(url + ROUTE, headers=sent).status_code] += 1
                assert time.monotonic() - began < 60, "no epoch has begun and ended"
            assert set(answers) == {200} and answers[200] > 100
        assert httpx.get(url + ROUTE, headers=first).status_code == 401, "the old token is of no use"
        assert httpx.get(url + ROUTE, headers=sent).status_code == 200
    epochs = [Epochs.read(content["epoch"]) for content in (before, _content(api, EPOCH))]
    assert epochs[1].previous == epochs[0].newest != epochs[1].newest
    assert "rl.grpo.dev/rotate" not in api.get("secret", EPOCH)["metadata"].get("annotations", {})


def _with_pods(api: Api, name: str) -> dict[str, Any]:
    until(f"{name} has pods", lambda: _pods(api, name), 60)
    return api.get("grpojob", name)


def _ended(api: Api) -> bool:
    epochs = Epochs.read(_content(api, EPOCH)["epoch"])
    return epochs.previous is not None and epochs.settled(time.time() - 0.5)


def test_a_job_and_its_shared_pool_get_a_key_between_them(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    spec = tiny["spec"]["rollout"]["template"] | {"model": tiny["spec"]["model"]}
    pool = {"apiVersion": tiny["apiVersion"], "kind": "RolloutPool", "metadata": {"name": "standing"}}
    assert api.apply(pool | {"spec": spec}).returncode == 0
    tiny["spec"]["rollout"] = {"poolRef": {"name": "standing"}}
    assert api.apply(tiny).returncode == 0
    job = _with_pods(api, "tiny-moe")
    standing, master = api.get("rpool", "standing"), _content(api, MASTER)["key"]
    assert _content(api, key_secret(job)) == secret_data(master, job, "standing")
    assert _content(api, key_secret(standing)) == secret_data(master, standing, None)
    (controller,) = [p for p in _pods(api, "tiny-moe") if p["metadata"]["labels"][POOL] == "controller"]
    variables = {v["name"] for v in controller["spec"]["containers"][0]["env"]}
    assert {auth.FILE, auth.EPOCH_FILE, auth.PAIR_FILE} <= variables
    assert writer(job) == f"tiny-moe-{job['metadata']['uid'][:8]}"


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    api.ok("create", "namespace", "apart")
    yield "apart"
    api.ok("delete", "namespace", "apart", "--wait=false")


@pytest.mark.fault(
    row="key-rotation",
    point="the Secrets lack key and epoch",
    witness="the message names the Secret and the entry",
    bound="90 s",
    partial="no rotation during an update",
)
def test_secrets_without_their_entries_stall_the_job_until_deleted(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, namespace: str
) -> None:
    fake_nodes(2)
    for secret in (MASTER, EPOCH):
        api.ok("create", "secret", "generic", secret, "--from-literal=other=x", "-n", namespace)
    assert api.apply(tiny | {"metadata": {"name": "kept", "namespace": namespace}}).returncode == 0

    def stalled() -> str:
        status = api.get("grpo", "kept", "-n", namespace).get("status") or {}
        return next((c["message"] for c in status.get("conditions", []) if c["type"] == "Stalled"), "")

    for secret, lacks in ((MASTER, "no 'key'"), (EPOCH, "no 'epoch'")):
        wanted = f"Secret apart/{secret} has {lacks}: delete it"
        until(f"the job says {wanted}", lambda: wanted in stalled(), 90)  # noqa: B023 - called here
        assert api.get("rayclusters,pods", "-n", namespace)["items"] == []
        api.ok("delete", "secret", secret, "-n", namespace)
    until("its pods", lambda: len(api.get("pods", "-n", namespace)["items"]) == 6, 90)
    assert Epochs.read(_content(api, EPOCH, namespace)["epoch"]).newest
    api.ok("delete", "grpo", "kept", "-n", namespace, "--cascade=foreground", "--timeout=60s")
