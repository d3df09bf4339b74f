"""Agent on a further host of a multi-host engine: passes the reports of its server on to the first host.

The first host's agent leads the updates of the whole engine; this one streams to the ranks of its own host
what they keep (host_part.py).
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_worker.common import tls
from grpo_worker.common.auth import guarded, headers, serve
from grpo_worker.common.prometheus import metrics_route
from grpo_worker.weightsync.agent.engine_place import START_SECONDS
from grpo_worker.weightsync.agent.expert_routes import expert_routes
from grpo_worker.weightsync.agent.host_rendezvous import HostReport
from grpo_worker.weightsync.agent.part_routes import HostParts, part_routes

_RELAY_SECONDS, _PING_SECONDS = 3.0, 5.0
_LOOPBACK = ("127.0.0.1", "::1")


class FurtherHost:
    """One further host.

    ``first``: URL of the first host's agent. ``server_answers``: pings the server. ``start_seconds``: in
    which a started server must answer. ``url``: of this agent.
    """

    def __init__(
        self, host: int, pod: str, first: str, server_answers: Callable[[], bool],
        start_seconds: float = START_SECONDS, url: str = "",
    ) -> None:  # fmt: skip
        self._host = host
        self._pod, self._url = pod, url
        self._server_answers = server_answers
        self._start_seconds = start_seconds
        self._http = httpx.Client(base_url=first, timeout=_RELAY_SECONDS, verify=tls.own())
        self._round, self._began, self._answered = "", 0.0, False
        self.serving = False  # whether the whole engine serves

    def report(self, fields: dict[str, str]) -> dict[str, Any]:
        """Pass a report on and return the answer. Raises httpx.HTTPError if there is none."""
        body = asdict(report_of(self._host, self._pod, fields, self._url))
        try:
            response = self._http.post("/v1/hosts", json=body, headers=headers())
            answer = dict(response.raise_for_status().json())
        except httpx.HTTPError:
            self.serving = False
            raise
        self.serving = bool(answer["serving"])
        serve(answer["served"])
        if answer["round"] != self._round:
            self._round, self._began, self._answered = answer["round"], time.monotonic(), False
        return answer

    def lives(self) -> bool:
        """Return whether the engine's container needs no restart: it waits, starts, or its server answers."""
        if self._server_answers():
            self._answered = True
            return True
        starts = not self._answered and time.monotonic() - self._began < self._start_seconds
        return not self._round or starts


def answers(server: str) -> bool:
    """Return whether the server at a URL answers."""
    try:
        return httpx.get(f"{server}/ping", timeout=_PING_SECONDS).status_code == 200
    except httpx.HTTPError:
        return False


def report_of(host: int, pod: str, fields: dict[str, str], agent: str = "") -> HostReport:
    """Return the report of a host, from the query that its engine's container sent. Raises KeyError.

    ``agent``: URL of a further host's agent.
    """
    rest = {name: fields.get(name, "") for name in ("round", "ended", "error")}
    return HostReport(host, pod, fields["process"], **rest, agent=agent)


def host_route(report: Callable[[dict[str, str]], dict[str, Any]]) -> Route:
    """Return the route by which the pod's own engine container reports; 503: the first host is not there."""

    async def answer(request: Request) -> Response:
        if request.client is None or request.client.host not in _LOOPBACK:
            return PlainTextResponse("only this pod's engine may report here", 403)
        try:
            return JSONResponse(await run_in_threadpool(report, dict(request.query_params)))
        except httpx.HTTPError as error:
            return PlainTextResponse(f"the agent of the first host: {error!r}", 503)
        except KeyError as error:
            return PlainTextResponse(f"missing field {error}", 400)

    return Route("/hostz", answer)


def application(host: FurtherHost, parts: HostParts, experts: Path | None = None) -> Starlette:
    """Return the HTTP application. Ready means, as on the first host, that the whole engine serves.

    ``parts``: of the versions that the engine loads. ``experts``: folder in which this host's server keeps
    routed experts.
    """
    return guarded(
        [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            metrics_route(),
            Route("/readyz", lambda _: _verdict(host.serving, "the engine does not serve")),
            Route("/enginez", lambda _: _verdict(host.lives(), "the engine does not answer")),
            host_route(host.report),
            *part_routes(parts),
            *expert_routes(experts),
        ],
        pair=lambda _: True,
    )


def _verdict(good: bool, otherwise: str) -> Response:
    return PlainTextResponse("ok") if good else PlainTextResponse(otherwise, 503)
