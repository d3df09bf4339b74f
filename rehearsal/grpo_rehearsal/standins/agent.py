"""Stand-in of the agent beside an engine: owns the engine's version, and takes updates of it.

It speaks the protocol of ``grpo_worker.weightsync.agent.http``. An update takes the time that the plan gives:
``link`` and ``take`` for direct transfers, ``sync`` for a version that the trainers' agents have staged.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from grpo_operator.api.messages import AgentStatus, EngineHost
from grpo_operator.api.v1alpha1.status import EngineState, HostState
from grpo_rehearsal.network import Answer
from grpo_rehearsal.standins.engine import StandInEngine
from grpo_rehearsal.standins.links import Join
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_worker.weightsync.protocol.link_offer import LinkOffer


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of an engine's updates. ``join``: of its link. ``take``: of a direct transfer.

    ``fetch``: of a staged version, over the network and into the engine. ``turn``: of releasing or taking
    GPU memory that the trainers use too.
    """

    join: float
    take: float
    fetch: float
    turn: float = 0.0


class StandInAgent:
    """Agent of one engine. ``ranks``: GPUs of the engine, on ``hosts`` hosts.

    ``received``: bytes by kind of update; ``link``: what its ranks read from the store of a link. ``delay``:
    seconds by which every answer is late.
    """

    role = "agent"

    def __init__(
        self, engine: StandInEngine, scheduler: Scheduler, times: UpdateTimes, *, writer: str, ranks: int,
        hosts: int, bucket_bytes: int, version_bytes: int, join: Callable[[LinkOffer], Join],
        config: dict[str, Any],
    ) -> None:  # fmt: skip
        """``config``: config.json that the engine started with. ``version_bytes``: that an update brings.

        ``join``: returns what the engine costs that accepts an offer.
        """
        self.received = {"link": 0, "take": 0, "sync": 0}
        self.delay = 0.0
        self.dropped = 0  # routed experts that the pod need not keep any more
        self.updates: list[tuple[float, float, str]] = []  # (begin, end, kind)
        self._engine = engine
        self._scheduler = scheduler
        self._times = times
        self._writer, self._attempt = writer, 0
        self._ranks, self._hosts = ranks, hosts
        self._bucket_bytes, self._version_bytes = bucket_bytes, version_bytes
        self._join_of = join
        self._config = config
        self._state, self._since = EngineState.STALE, 0.0
        self._restarts, self._instance = 0, 0
        self._reason = "no weights yet"
        self._link = ""
        self._recorded = False  # whether the ranks have recorded what they keep since they started

    def engine_lost(self) -> None:
        """The server has died: it starts again without weights."""
        self._restarts += 1
        self._link, self._recorded = "", False
        self._change(EngineState.RESTARTING, "the server was lost")

    def engine_back(self) -> None:
        """The server answers again and needs weights."""
        self._change(EngineState.STALE, "started again")

    def handle(self, request: httpx.Request) -> Answer:
        """Answer a request of the controller."""
        answer = self._answer(request)
        answer.seconds += self.delay
        return answer

    def _answer(self, request: httpx.Request) -> Answer:
        path = request.url.path
        if path == "/v1/status":
            return Answer(body=json.dumps(self._status()).encode())
        if path == "/v1/model":
            return Answer(body=json.dumps(self._config).encode())
        body = json.loads(request.content)
        if path == "/v1/routed-experts/drop":
            self.dropped += len(body["keys"])
            return Answer(body=b"{}")
        if body["writer"] != self._writer or body["attempt"] < self._attempt:
            error = f"bound to {self._writer}, attempt {self._attempt}"
            return Answer(409, json.dumps(self._status() | {"error": error}).encode())
        self._attempt = body["attempt"]
        if not self._engine.alive:
            return Answer(500, json.dumps(self._status() | {"error": "the engine does not answer"}).encode())
        calls: dict[str, Callable[[], Answer]] = {
            "/v1/link": lambda: self._join(LinkOffer.from_json(body["offer"])),
            "/v1/take": lambda: self._take(int(body["version"]), str(body["link"])),
            "/v1/sync": lambda: self._sync(int(body["version"])),
            "/v1/turn": lambda: self._turn(list(body["parts"])),
        }
        return calls[path]() if path in calls else Answer(404, b'{"error": "not found"}')

    def _join(self, offer: LinkOffer) -> Answer:
        """Join a link. The recording overwrites the weights, so an engine that serves stops."""
        self._link = ""
        if not self._recorded and self._state is EngineState.SERVING:
            self._begin_update(f"joining {offer.name}")
        join = self._join_of(offer)
        self.received["link"] += self._ranks * join.table + join.receives

        def joined() -> dict[str, Any]:
            self._recorded = True
            self._link = "" if join.problem else offer.name
            return {"error": join.problem} if join.problem else {}

        return self._later(self._times.join, "link", joined)

    def _take(self, version: int, link: str) -> Answer:
        if link != self._link:
            error = f"not in {link}, but in {self._link or 'no link'}"
            return Answer(500, json.dumps(self._status() | {"error": error}).encode())
        self._begin_update("an update is received")
        return self._later(self._times.take, "take", lambda: self._serve("take", version))

    def _sync(self, version: int) -> Answer:
        if self._engine.version == version:
            return Answer(body=json.dumps(self._status() | {"seconds": {}}).encode())
        self._begin_update("an update is fetched")
        return self._later(self._times.fetch, "sync", lambda: self._serve("sync", version))

    def _turn(self, parts: list[str]) -> Answer:
        """Hold exactly these parts of the GPU memory; a server without its weights serves nothing."""
        if not parts:
            self._engine.pause()
            self._engine.version = None
            self._change(EngineState.STALE, "the trainers use the GPUs")
        return self._later(self._times.turn, "turn", dict)

    def _begin_update(self, reason: str) -> None:
        self._engine.pause()
        self._change(EngineState.STALE, reason)

    def _serve(self, kind: str, version: int) -> dict[str, Any]:
        self.received[kind] += self._version_bytes
        self._engine.resume(version)
        self._change(EngineState.SERVING, "")
        seconds = self._times.take if kind == "take" else self._times.fetch
        return {"seconds": {"transfer": seconds}}

    def _later(self, seconds: float, kind: str, done: Callable[[], dict[str, Any]]) -> Answer:
        """Answer after ``seconds`` with what ``done`` returns, unless the engine dies meanwhile."""
        restarts, now = self._restarts, self._scheduler.now
        self.updates.append((now, now + seconds, kind))

        def finish() -> bytes:
            if self._restarts != restarts:
                return json.dumps(self._status() | {"error": "the engine was lost during the call"}).encode()
            more = done()
            return json.dumps(self._status() | more).encode()

        return Answer(seconds=seconds, then=finish)

    def _change(self, state: EngineState, reason: str) -> None:
        self._state, self._reason, self._since = state, reason, self._scheduler.now

    def _status(self) -> dict[str, Any]:
        serving = self._state is EngineState.SERVING
        return AgentStatus(
            name=self._engine.name,
            state=self._state,
            instance=f"{self._engine.name}-{self._instance}",
            writer=self._writer,
            attempt=self._attempt,
            weight_version=self._engine.version if serving else None,
            since=f"{self._since:.1f}",
            restarts=self._restarts,
            reason=self._reason,
            ranks=self._ranks,
            bucket_bytes=self._bucket_bytes,
            settled=True,
            hosts=self._host_states() if self._hosts > 1 else [],
        ).wire()

    def _host_states(self) -> list[EngineHost]:
        pods = (self._engine.name, *(f"{self._engine.name}-host-{n}" for n in range(1, self._hosts)))
        state = HostState.RUNNING if self._engine.alive else HostState.WAITING
        return [EngineHost(host=number, pod=pod, state=state) for number, pod in enumerate(pods)]
