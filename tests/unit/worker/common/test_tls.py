"""HTTPS between real servers and every kind of client that pods have."""

import asyncio
import contextlib
import http.client
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_operator.render.certificates import RENEWED
from grpo_worker.common import auth, tls
from grpo_worker.common.listeners import Server
from grpo_worker.common.patient_http import patient_transport
from grpo_worker.rollout.connections import Connections
from grpo_worker.rollout.engine_http import EngineHttp
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.http_reader import FetchError, HttpReader
from support.engine_server import free_port
from support.pod_tls import PodTls, owner

MASTER = "m" * 64
A, B = owner("GRPOJob", "a", "aaaa1111-1"), owner("GRPOJob", "b", "bbbb1111-1")
SHARED = owner("RolloutPool", "shared", "cccc1111-1")
HOSTS = ("127.0.0.1", "::1")
Client = Callable[[str, int], str]  # calls /model_info at a host and port; returns the version in the answer


def _version(_: Request) -> Response:
    return JSONResponse({"weight_version": "7"})


def _body(request: Request) -> Response:
    return Response(b"7", headers={"seen-authorization": request.headers.get("authorization", "")})


ROUTES = [Route("/model_info", _version), Route("/ping", _version), Route("/bytes", _body)]


@contextlib.contextmanager
def serving(pod: PodTls | None) -> Iterator[int]:
    """Serve from a pod on all addresses; its port."""
    port = free_port()
    with pod.inside() if pod else contextlib.nullcontext():
        server = Server(Starlette(routes=ROUTES), port)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield port
    finally:
        server.stop()
        thread.join()


def _httpx(host: str, port: int) -> str:
    with httpx.Client(verify=tls.own()) as client:
        return str(client.get(tls.url(host, port, "/model_info")).json()["weight_version"])


def _patient(host: str, port: int) -> str:
    with httpx.Client(transport=patient_transport(tls.own())) as client:
        return str(client.get(tls.url(host, port, "/model_info")).json()["weight_version"])


def _asynchronous(host: str, port: int) -> str:
    async def call() -> str:
        async with httpx.AsyncClient(verify=tls.own()) as client:
            return str((await client.get(tls.url(host, port, "/model_info"))).json()["weight_version"])

    return asyncio.run(call())


def _rollout(host: str, port: int) -> str:
    async def call() -> str:
        client = EngineHttp(Connections(), port)
        try:
            return str((await client.get(host, "/model_info"))["weight_version"])
        finally:
            await client.aclose()

    return asyncio.run(call())


def _engine(host: str, port: int) -> str:
    return Engine(tls.url(host, port), 5).weight_version()


def _reader(host: str, port: int) -> str:
    with HttpReader(5).get(tls.url(host, port, "/bytes")) as body:
        return body.read().decode()


def _urllib(host: str, port: int) -> str:
    with urllib.request.urlopen(tls.url(host, port, "/bytes"), context=tls.for_urllib()) as answer:
        return str(answer.read().decode())


CLIENTS: list[Client] = [_httpx, _patient, _asynchronous, _rollout, _engine, _reader, _urllib]
REFUSED = (httpx.TransportError, EngineError, FetchError, urllib.error.URLError)
every_client = pytest.mark.parametrize("call", CLIENTS, ids=lambda call: call.__name__.strip("_"))


@pytest.fixture
def pods(tmp_path: Path) -> dict[str, PodTls]:
    return {
        "a": PodTls(tmp_path / "a", MASTER, A),
        "b": PodTls(tmp_path / "b", MASTER, B),
        "of another CA": PodTls(tmp_path / "other", "n" * 64, A),
    }


@pytest.mark.parametrize("host", HOSTS)
@every_client
def test_pods_of_a_job_call_each_other_on_both_families(
    pods: dict[str, PodTls], call: Client, host: str
) -> None:
    with serving(pods["a"]) as port, pods["a"].inside():
        assert call(host, port) == "7"


@pytest.mark.parametrize("host", HOSTS)
@every_client
def test_without_the_field_everything_is_http_on_both_families(call: Client, host: str) -> None:
    with serving(None) as port:
        assert tls.url(host, port).startswith("http://")
        assert call(host, port) == "7"


@every_client
def test_a_pod_of_another_job_is_refused_and_gets_no_request(pods: dict[str, PodTls], call: Client) -> None:
    refusal = pytest.raises(REFUSED, match=r"certificate is for b\.ns\.grpo, not for a\.ns\.grpo")
    with serving(pods["b"]) as port, pods["a"].inside(), refusal:
        call("127.0.0.1", port)


@every_client
def test_a_certificate_of_another_ca_is_refused(pods: dict[str, PodTls], call: Client) -> None:
    refusal = pytest.raises(REFUSED, match=r"certificate verify failed")
    with serving(pods["of another CA"]) as port, pods["a"].inside(), refusal:
        call("127.0.0.1", port)


def test_a_tls_port_answers_no_plain_http(pods: dict[str, PodTls]) -> None:
    with serving(pods["a"]) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/model_info")
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.getresponse()


def test_a_client_with_tls_sends_nothing_to_a_plain_port(pods: dict[str, PodTls]) -> None:
    with serving(None) as port, pods["a"].inside(), pytest.raises(httpx.TransportError):
        _httpx("127.0.0.1", port)


def _months(pod: PodTls) -> Iterator[None]:
    """Renew certificates that are three periods old, period by period."""
    for ago in (2, 1, 0):
        pod.see(time.time() - ago * RENEWED.total_seconds())
        yield


@pytest.mark.parametrize(
    "steps", [_months, lambda pod: pod.replace_authority("n" * 64)], ids=["renewed", "another CA and key"]
)
def test_certificates_are_replaced_under_calls_without_a_refusal(
    pods: dict[str, PodTls], steps: Callable[[PodTls], Iterator[None]]
) -> None:
    pod, answers, problems = pods["a"], [0], list[BaseException]()
    ended = threading.Event()
    pod.see(time.time() - 3 * RENEWED.total_seconds())

    def call_forever() -> None:
        try:
            while not ended.is_set():
                _httpx("127.0.0.1", port)  # with a connection of its own each time
                answers[0] += 1
        except BaseException as error:  # noqa: BLE001 - the test reports it
            problems.append(error)

    with serving(pod) as port, pod.inside():
        first = _peer(port)
        callers = [threading.Thread(target=call_forever) for _ in range(2)]
        for caller in callers:
            caller.start()
        for _ in steps(pod):
            before = answers[0]
            while answers[0] < before + 4 and not problems:
                time.sleep(0.01)
        ended.set()
        for caller in callers:
            caller.join()
        assert not problems and _peer(port) != first, "the server presents the newest one"


def test_clients_stop_to_trust_a_ca_that_was_taken_away(pods: dict[str, PodTls]) -> None:
    with serving(pods["a"]) as port, pods["a"].inside():
        with httpx.Client(verify=tls.own()) as client:
            assert client.get(tls.url("::1", port, "/ping")).status_code == 200
            other = (pods["of another CA"].folder / "ca.crt").read_text()
            (pods["a"].folder / "ca.crt").write_text(other)
        with httpx.Client(verify=tls.own()) as client, pytest.raises(httpx.ConnectError):
            client.get(tls.url("::1", port, "/ping"))


def test_a_folder_that_cannot_be_read_leaves_what_was_read_before(
    pods: dict[str, PodTls], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(pods["a"]) as port, pods["a"].inside():
        verify = tls.own()
        (pods["a"].folder / "ca.crt").write_text("nothing")
        (pods["a"].folder / "tls.crt").write_text("nothing")
        with httpx.Client(verify=verify) as client:
            assert client.get(tls.url("127.0.0.1", port, "/ping")).status_code == 200
    assert "cannot be read, those before are used" in caplog.text


def test_a_job_and_its_shared_pool_accept_each_other(tmp_path: Path) -> None:
    job, pool = PodTls(tmp_path / "job", MASTER, A, "shared"), PodTls(tmp_path / "pool", MASTER, SHARED)
    other = PodTls(tmp_path / "other", MASTER, B)
    with serving(job) as trainer, serving(pool) as engine, serving(other) as stranger:
        with job.inside():
            assert _rollout("127.0.0.1", engine) == "7"
            with pytest.raises(httpx.TransportError):
                _httpx("127.0.0.1", engine)
        with pool.inside():
            with pytest.raises(FetchError):
                _reader("127.0.0.1", trainer)
            auth.serve("a-aaaa1111")
            try:
                assert _reader("127.0.0.1", trainer) == _reader("127.0.0.1", engine) == "7"
                with pytest.raises(FetchError):
                    _reader("127.0.0.1", stranger)
            finally:
                auth.serve(None)


def test_a_job_and_its_pool_have_the_key_of_the_pools_engines(tmp_path: Path) -> None:
    def key(of: PodTls) -> str:
        with of.inside():
            return tls.generate_headers()["authorization"]

    pool = PodTls(tmp_path / "pool", MASTER, SHARED)
    jobs = [PodTls(tmp_path / name, MASTER, A, "shared") for name in ("one", "two")]
    assert key(pool) == key(jobs[0]) == key(jobs[1])
    assert key(PodTls(tmp_path / "own", MASTER, A)) != key(pool)
    assert tls.generate_headers() == {}


def _peer(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port))
