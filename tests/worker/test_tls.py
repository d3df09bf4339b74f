"""A real engine, its agent and real trainers with ``scheduling.tls``, over IPv6."""

import socket
import ssl
import time
from collections.abc import Iterator

import httpx
import pytest

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_operator.render.certificates import RENEWED
from grpo_worker.common import tls
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.sampling import Sample, sampling_params
from support.engine_server import JOB, Server, free_port
from support.late_engine import Process
from support.pod_tls import PodTls, owner
from support.ranks.launcher import run as run_on_ranks

LAYOUT = {"tensor": 2, "expert": 2, "expert_tensor": 1}
VERSION = 3  # that the ranks publish
PORT, ADDRESS = free_port(), "::1"
PROMPTS = [Prompt(index, tuple(range(10, 20 + index))) for index in range(4)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodTls]:
    """Certificates of two periods ago, which every process of this module has."""
    name, _, uid = JOB.rpartition("-")
    pod = PodTls(tmp_path_factory.mktemp("tls") / "pod", "m" * 64, owner("GRPOJob", name, uid))
    pod.see(time.time() - 2 * RENEWED.total_seconds())
    with pod.inside():
        yield pod


@pytest.fixture(scope="module")
def trainer(pod: PodTls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Publish a version from two real trainer ranks, and serve it."""
    root = tmp_path_factory.mktemp("weights")
    run_on_ranks("policy_cases:publish", 2, root=str(root), layout=LAYOUT)
    sidecar = Process(f"trainer --weights {root}", root / "log", address=ADDRESS)
    try:
        sidecar.await_answer()
        yield sidecar
    finally:
        sidecar.end()


@pytest.fixture(scope="module")
def engine(pod: PodTls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(
        tmp_path_factory.mktemp("engine"), port=PORT, address=ADDRESS, return_routed_experts=False
    )
    try:
        running.await_answer()
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def agent(engine: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("agent")
    sidecar = Process(
        f"rollout --engine {engine.url} --admin-key {engine.key} --writer {JOB}",
        folder / "log",
        address=ADDRESS,
    )
    try:
        sidecar.await_answer()
        sidecar.await_state("STALE", 60)
        yield sidecar
    finally:
        sidecar.end()


@pytest.fixture
def client(engine: Server) -> Iterator[RolloutClient]:
    table = EngineTable()
    table.replace([EngineEntry("engine-0", ADDRESS, EngineState.SERVING, VERSION)])
    client = RolloutClient(table, seed=1, n=2, timeout=60, port=PORT)
    client.set_sampling(sampling_params(AlgorithmSpec(), 8, ()))
    yield client
    client.close()


def _samples(client: RolloutClient) -> list[Sample]:
    groups = [client.submit(prompt, VERSION) for prompt in PROMPTS]
    return [sample for group in groups for sample in group.result(120)]


def test_an_engine_takes_a_version_and_generates_over_tls_and_ipv6(
    trainer: Process, agent: Process, engine: Server, client: RolloutClient
) -> None:
    assert {server.url.rpartition(":")[0] for server in (trainer, agent, engine)} == {f"https://[{ADDRESS}]"}
    status = agent.sync(VERSION, dict.fromkeys(range(2), trainer.url))
    assert (status.get("state"), status.get("weightVersion")) == ("SERVING", VERSION), status
    samples = _samples(client)
    assert len(samples) == 2 * len(PROMPTS)
    assert {sample.version for sample in samples} == {VERSION}


def test_no_port_answers_plain_http(trainer: Process, agent: Process, engine: Server) -> None:
    for server in (trainer, agent, engine):
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection((ADDRESS, port), 5) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(1024)


def test_generation_needs_the_key_and_probes_do_not(engine: Server) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    with httpx.Client(verify=tls.own(), base_url=engine.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        assert http.post("/generate", json=body).status_code == 401
        assert http.post("/generate", json=body, headers=tls.generate_headers()).status_code == 200
        headers = tls.generate_headers()
        assert http.post("/pause_generation", json={}, headers=headers).status_code == 401, "a control route"


def test_the_engine_presents_each_new_certificate_while_it_generates(
    pod: PodTls, agent: Process, engine: Server, client: RolloutClient
) -> None:
    def await_current() -> None:
        """Generate until the engine presents the certificate that the pod has."""
        deadline = time.monotonic() + 60
        current = (pod.folder / "tls.crt").read_text().split()
        while ssl.get_server_certificate((ADDRESS, PORT)).split() != current:
            assert len(_samples(client)) == 2 * len(PROMPTS)
            assert time.monotonic() < deadline, engine.last_words()
        assert len(_samples(client)) == 2 * len(PROMPTS)

    for ago in (1, 0):
        pod.see(time.time() - ago * RENEWED.total_seconds())
        await_current()
    for _ in pod.replace_authority("n" * 64):
        await_current()
    assert agent.status()["state"] == "SERVING" and client.counts.retries == 0
