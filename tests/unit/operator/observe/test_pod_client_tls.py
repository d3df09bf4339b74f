"""The operator's calls to controllers that serve HTTPS: whom it believes, and who gets its token."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_operator.api import names
from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.observe import pod_client
from grpo_operator.observe.pod_client import PodClient
from grpo_worker.common.auth import guarded
from grpo_worker.common.listeners import Server
from support.engine_server import free_port
from support.pod_tls import PodTls, owner

MASTER = "m" * 64
A, B = owner("GRPOJob", "a", "aaaa1111-1"), owner("GRPOJob", "b", "bbbb1111-1")


class Controller:
    """A server that reports a status and keeps the tokens that it was sent."""

    def __init__(self, pod: PodTls, port: int) -> None:
        self.tokens: list[str] = []
        routes = [Route("/v1/status", self._status), Route("/v1/suspend", self._suspend, methods=["POST"])]
        with pod.inside():
            self._server = Server(guarded(routes), port)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()

    def _status(self, _: Request) -> Response:
        return JSONResponse(ControllerStatus(phase=Phase.TRAINING, attempt=3).wire())

    def _suspend(self, request: Request) -> Response:
        self.tokens.append(request.headers["authorization"])
        return JSONResponse({})

    def stop(self) -> None:
        self._server.stop()
        self._thread.join()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    monkeypatch.setattr(pod_client, "CONTROLLER_PORT", port)
    return port


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[PodClient]:
    trusted = (PodTls(tmp_path / "ca", MASTER, A).folder / "ca.crt").read_text()

    async def context(_: names.Owner) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=trusted)

    client = PodClient(context)
    yield client
    await client.close()


@contextlib.asynccontextmanager
async def serving(pod: PodTls, port: int) -> AsyncIterator[Controller]:
    controller = Controller(pod, port)
    try:
        yield controller
    finally:
        # The client's loop answers the end of its connection, for which the server waits half a minute.
        await asyncio.to_thread(controller.stop)


def pods(address: str, tls: bool = True) -> tuple[dict[str, Any], ...]:
    labels = {names.JOB_LABEL: "a", names.POOL_LABEL: names.CONTROLLER}
    labels |= {names.TLS_LABEL: "enabled"} if tls else {}
    metadata = {"name": "controller-0", "namespace": "ns", "labels": labels}
    return ({"metadata": metadata, "status": {"podIP": address}},)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_the_operator_polls_and_orders_over_tls(
    client: PodClient, port: int, tmp_path: Path, address: str
) -> None:
    async with serving(PodTls(tmp_path / "a", MASTER, A), port) as controller:
        found = (await client.controllers(pods(address))).status
        assert found is not None and found.attempt == 3
        await client.order(pods(address), True, [], None, "secret")
        assert controller.tokens == ["Bearer secret"]
        assert (await client.controllers(pods(address, tls=False))).status is None


@pytest.mark.parametrize(("master", "of"), [(MASTER, B), ("n" * 64, A)], ids=["other name", "other CA"])
async def test_a_pod_that_is_not_of_the_job_is_not_believed_and_gets_no_token(
    client: PodClient, port: int, tmp_path: Path, master: str, of: dict[str, Any]
) -> None:
    async with serving(PodTls(tmp_path / "other", master, of), port) as controller:
        assert (await client.controllers(pods("127.0.0.1"))).status is None
        await client.order(pods("127.0.0.1"), True, [], None, "secret")
        assert controller.tokens == []
