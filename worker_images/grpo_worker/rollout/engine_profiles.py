"""Profiles of engines: ordered from their agents, and fetched into the store."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from grpo_operator.api.names import AGENT_PORT
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common import tls
from grpo_worker.common.auth import pair_headers
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.rollout.routing import EngineEntry, EngineTable

_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 60.0  # of an agent whose engine may be writing a trace
_CHUNK = 1 << 20  # bytes


class EngineProfileError(RuntimeError):
    """An engine recorded no profile; the message names it."""


class EngineProfiles:
    """Traces of engines' forward passes.

    Engines cannot write to the job's store, and those of a shared pool do not even mount it, so the files
    come over their agents. An engine that fails a request for a profile goes on generating.
    """

    def __init__(
        self, table: EngineTable, writer: str, attempt: Callable[[], int], clock: Clock = SYSTEM_CLOCK,
        port: int = AGENT_PORT,
    ) -> None:  # fmt: skip
        """``writer``, ``attempt``: the job, as the agents know it."""
        self._table = table
        self._writer = writer
        self._attempt = attempt
        self._clock = clock
        self._port = port
        self._http = httpx.Client(timeout=_ANSWER_SECONDS, verify=tls.pair())

    def record(self, identity: str, engines: Sequence[str], steps: int, folder: Path) -> list[str]:
        """Trace the next ``steps`` forward passes of engines; return the names of the files in ``folder``.

        ``engines``: names; none: one that serves. Returns when all are written: an engine without requests
        takes no steps. Raises EngineProfileError when an engine does not know the profile, or restarts.
        """
        chosen = self._chosen(engines)
        for engine in chosen:
            body = {"writer": self._writer, "attempt": self._attempt(), "id": identity, "steps": steps}
            self._answer(engine, "POST", "profile", json=body)
        folder.mkdir(parents=True, exist_ok=True)
        return [name for engine in chosen for name in self._fetched(engine, identity, folder)]

    def _chosen(self, names: Sequence[str]) -> list[EngineEntry]:
        known = {entry.name: entry for entry in self._table.entries()}
        missing = [name for name in names if name not in known]
        if missing:
            raise EngineProfileError(
                f"engines={missing[0]}: the pool has no such engine: use one of {', '.join(known) or 'none'}"
            )
        if names:
            return [known[name] for name in names]
        serving = [entry for entry in known.values() if entry.state is EngineState.SERVING]
        if not serving:
            raise EngineProfileError("no engine serves: ask again when status.rollout.ready is above 0")
        return serving[:1]

    def _fetched(self, engine: EngineEntry, identity: str, folder: Path) -> list[str]:
        """Wait until an engine has written its files, and fetch them; return their names in ``folder``."""
        while not (names := self._answer(engine, "GET", f"profile/{identity}")["files"]):
            now = self._table.entry(engine.name)
            if now is None or now.life != engine.life:
                raise EngineProfileError(f"{engine.name}: the engine was restarted before it had recorded")
            self._clock.sleep(_POLL_SECONDS)
        stored = []
        for name in names:
            stored.append(f"engine-{engine.name}-{name.removeprefix(f'{identity}-')}")
            self._fetch(engine, f"profile/{identity}/{name}", folder / stored[-1])
        return stored

    def _answer(self, engine: EngineEntry, method: str, route: str, **options: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, self._url(engine, route), headers=pair_headers(), **options)
            answer = dict(response.json())
        except (httpx.HTTPError, ValueError) as error:
            raise EngineProfileError(f"{engine.name}: {error!r}") from error
        if "error" in answer:
            raise EngineProfileError(f"{engine.name}: {answer['error']}")
        return answer

    def _fetch(self, engine: EngineEntry, route: str, file: Path) -> None:
        try:
            with (
                self._http.stream("GET", self._url(engine, route), headers=pair_headers()) as response,
                file.open("wb") as out,
            ):
                response.raise_for_status()
                for chunk in response.iter_bytes(_CHUNK):
                    out.write(chunk)
        except httpx.HTTPError as error:
            raise EngineProfileError(f"{engine.name}: {error!r}") from error

    def _url(self, engine: EngineEntry, route: str) -> str:
        return tls.url(engine.address, self._port, f"/v1/{route}")
