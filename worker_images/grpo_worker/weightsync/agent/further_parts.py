"""Further parts: the parts of a version that the agents of an engine's further hosts stream to their ranks.

They are led by the first host's agent, as one transaction: the part that fails first ends all of them.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from grpo_worker.common import tls
from grpo_worker.common.auth import headers
from grpo_worker.common.polling import pause_after
from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.part_messages import (
    PartPhase,
    PartRequest,
    PartState,
    table_bytes,
    table_from,
)
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.planner.rank_parts import Table, union_of_tables

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.02  # at first
_END_SECONDS = 3.0


class FurtherParts:
    """Parts of the further hosts whose agents have the URLs ``urls``; none for an engine of one host.

    Use it as a context manager: it begins the parts, and ends them. ``name``: of the streams. ``ranks``: of
    the whole engine. ``timeout``: seconds in which an agent must answer.
    """

    def __init__(
        self, urls: Sequence[str], name: str, staged: StagedVersion, ranks: int, timeout: float
    ) -> None:
        self.name = name
        own = ranks // (1 + len(urls))
        self._parts = []
        for host, url in enumerate(urls, 1):
            request = PartRequest(
                name, staged.version, staged.plan.plan_id, staged.sources, staged.digests, host * own,
                (host + 1) * own, staged.stored,
            )  # fmt: skip
            self._parts.append(_Part(host, url, request, timeout))

    def __enter__(self) -> "FurtherParts":
        try:
            for part in self._parts:
                part.begin()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all parts: their ranks give up at once if they still wait for bytes."""
        for part in self._parts:
            part.end()

    def check(self) -> None:
        """Raise FetchError if a part has failed, or its agent does not answer."""
        if problem := self.problem():
            raise FetchError(problem)

    def problem(self) -> str:
        """Return why a part has failed, or ""."""
        return next((part.problem for part in self._parts if part.problem), "")

    def last_problem(self) -> str:
        """Ask all agents once more, and return why a part has failed, or ""."""
        for part in self._parts:
            part.look(_END_SECONDS)
        return self.problem()

    def reached(self, phase: PartPhase) -> bool:
        """Return whether all parts have reached a phase."""
        return all(part.state.phase.reached(phase) for part in self._parts)

    def wait_for(self, phase: PartPhase, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until all parts have reached a phase. Each limits its waits itself, by its progress.

        ``given_up``: whether the engine has ended the request. Raises FetchError, or EngineError.
        """
        began = time.monotonic()
        while not self.reached(phase):
            self.check()
            if given_up():
                raise EngineError("the engine has ended the request")
            time.sleep(pause_after(time.monotonic() - began, _LOOK_SECONDS))
            for part in self._parts:
                part.look()

    @property
    def ports(self) -> list[int]:
        """Ports at which the ranks of each host connect."""
        return [part.state.port for part in self._parts]

    def release(self, tables: Sequence[Table], given_up: Callable[[], bool]) -> None:
        """Let all parts be streamed, when all ranks have told what they keep.

        ``tables``: of the ranks of the first host. A byte that ranks of several hosts keep is counted by the
        first of these hosts. Raises FetchError, or EngineError.
        """
        self.wait_for(PartPhase.KEPT, given_up)
        for part in self._parts:
            earlier = union_of_tables(tables)
            tables = [earlier, part.kept()]
            part.release(earlier)

    @property
    def states(self) -> list[PartState]:
        """States of all parts, by host."""
        return [part.state for part in self._parts]


class _Part:
    """One part. ``state``: the last that was heard of. ``problem``: why it has failed, or ""."""

    def __init__(self, host: int, url: str, request: PartRequest, timeout: float) -> None:
        self._url = f"{url}/v1/part"
        self._where = f"host {host} ({url})"
        self._request, self._timeout = request, timeout
        self._http = httpx.Client(timeout=timeout, verify=tls.own())
        self._ended = threading.Event()
        self.state, self.problem = PartState(), ""

    def begin(self) -> None:
        self._call("POST", "", json=self._request.to_json())
        threading.Thread(target=self._watch, daemon=True).start()

    def kept(self) -> Table:
        return table_from(self._call("GET", f"/{self._request.name}/kept").content)

    def release(self, counted: Table) -> None:
        self._call("POST", f"/{self._request.name}/release", content=table_bytes(counted))

    def end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(httpx.HTTPError):  # it ends by itself when nobody asks for it
            self._http.delete(f"{self._url}/{self._request.name}", headers=headers(), timeout=_END_SECONDS)
        self._http.close()

    def _watch(self) -> None:
        """Ask for the state until the end: this also shows the agent that the update goes on."""
        began = time.monotonic()
        while not self.problem and not self._ended.wait(pause_after(time.monotonic() - began, _LOOK_SECONDS)):
            self.look()

    def look(self, timeout: float | None = None) -> None:
        """Ask for the state once; ``timeout``: seconds, None: those of every call."""
        try:
            limit = self._timeout if timeout is None else timeout
            answer = self._call("GET", f"/{self._request.name}", timeout=limit)
            state = PartState.from_json(answer.json())
            problem = state.problem and f"{self._where}: {state.problem}"
            if not self.state.phase.reached(state.phase) or problem:  # another thread may have heard more
                self.state = state
        except (FetchError, ValueError, KeyError) as error:
            problem = str(error)
        if problem and not self._ended.is_set():
            self.problem = problem

    def _call(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Call the agent. Raises FetchError."""
        try:
            response = self._http.request(method, self._url + path, headers=headers(), **more)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            raise FetchError(f"{self._where}: {error!r}") from error
        if response.status_code != httpx.codes.OK:
            raise FetchError(f"{self._where}: HTTP {response.status_code} {response.text[:256]}")
        return response
