"""Answers of the operator's probes, with their reasons.

Liveness fails only where a new process can help: the loop stands still, or a watch delivers nothing although
the API server lists the objects. An operator that waits for the API server or for a right is not ready, but
alive. A process whose event loop is blocked does not answer at all.
"""

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Protocol

from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_operator import __version__
from grpo_operator.observe.freshness import Problem

PORT = 9091
RESTART_SECONDS = 300.0  # that the loop may stand still, or a watch be silent, before a restart
READY_SECONDS = 90.0  # that a kind, or the loop, may be old


class Cached(Protocol):
    """Part of the freshness of the cache that is judged."""

    def ages(self) -> dict[str, float]: ...
    def problems(self) -> dict[str, Problem]: ...


class Passes(Protocol):
    """Part of the loop that is judged. ``last_pass``: None before the first pass."""

    last_pass: float | None

    def longest_reconcile(self) -> float: ...


class Health:
    """The state of the operator. ``waiting_for``: returns what the start waits for, or "".

    ``on_standby``: returns whether another replica is the leader, so that the loop must not run.
    """

    def __init__(
        self, loop: Passes, cached: Cached, waiting_for: Callable[[], str], now: Callable[[], float],
        on_standby: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._loop, self._cached, self._waiting_for, self._now = loop, cached, waiting_for, now
        self._on_standby = on_standby

    def loop_age(self) -> float | None:
        """Return the seconds since the last finished pass; None before the first, and on standby."""
        if self._loop.last_pass is None or self._on_standby():
            return None
        return self._now() - self._loop.last_pass

    def longest_reconcile(self) -> float:
        """Return the seconds that the longest running reconcile has taken."""
        return self._loop.longest_reconcile()

    def cache_ages(self) -> dict[str, float]:
        """Return the seconds since the cache was proved to be up to date, by kind."""
        return self._cached.ages()

    def not_alive(self) -> list[str]:
        """Return the reasons for a restart."""
        return [*self._slow_loop(RESTART_SECONDS), *self._old_kinds(RESTART_SECONDS, only_silent=True)]

    def not_ready(self) -> list[str]:
        """Return why the operator does not do its work at present."""
        begun = self._loop.last_pass is not None or self._on_standby()
        starting = [] if begun else [self._starting()]
        return [*starting, *self._slow_loop(READY_SECONDS), *self._old_kinds(READY_SECONDS)]

    def _starting(self) -> str:
        waiting = self._waiting_for()
        return f"starting: the cache waits for {waiting}" if waiting else "starting"

    def _slow_loop(self, limit: float) -> list[str]:
        age = self.loop_age()
        return [f"the last pass of the reconcile loop was {age:.0f} s ago"] if age and age > limit else []

    def _old_kinds(self, limit: float, only_silent: bool = False) -> Iterator[str]:
        problems = self._cached.problems()
        for plural, age in self._cached.ages().items():
            problem = problems.get(plural)
            if age > limit and (not only_silent or (problem is not None and problem.silent)):
                reason = problem.text if problem else f"{plural}: no event and no successful listing"
                yield f"{reason} (for {age:.0f} s)"


class HealthServer:
    """HTTP server of the probes: /healthz for liveness, /readyz for readiness. ``host``: default all."""

    def __init__(self, health: Health, host: str | None = None, port: int = PORT) -> None:
        self._health, self._host, self._port = health, host, port
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)

    async def start(self) -> int:
        """Listen; return the port. Raises OSError when the port is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the server."""
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._health.not_alive())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._health.not_ready())


def _answer(reasons: list[str]) -> web.Response:
    if reasons:
        return web.Response(text="\n".join(reasons) + "\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
    return web.Response(text="ok\n")


class HealthCollector(Collector):
    """Gauges of the operator's own state, computed at each scrape."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; the age of the loop only after its first pass."""
        info = GaugeMetricFamily("grpo_build_info", "Version of the operator", labels=["version"])
        info.add_metric([__version__], 1)
        loop = GaugeMetricFamily(
            "grpo_loop_age_seconds", "Seconds since the last finished pass of the reconcile loop"
        )
        age = self._health.loop_age()
        if age is not None:
            loop.add_metric([], age)
        longest = GaugeMetricFamily(
            "grpo_longest_reconcile_seconds", "Seconds that the longest running reconcile has taken"
        )
        longest.add_metric([], self._health.longest_reconcile())
        cached = GaugeMetricFamily(
            "grpo_cache_age_seconds",
            "Seconds since a watch event, or a listing that agreed with the cache",
            labels=["kind"],
        )
        for kind, seconds in self._health.cache_ages().items():
            cached.add_metric([kind], seconds)
        yield from (info, loop, longest, cached)
