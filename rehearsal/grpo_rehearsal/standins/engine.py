"""Stand-in SGLang server: continuous batching on virtual time behind SGLang 0.5.23's HTTP interface.

It answers ``/generate`` (streamed as server-sent events, or whole), ``/abort_request`` and ``/v1/loads``. The
bodies have the fields that the real server's TokenizerManager writes; without ``incremental``, a streamed
event repeats all earlier tokens, as the real server's default does.
"""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from grpo_rehearsal.network import Answer
from grpo_rehearsal.standins.batching import Batch, Replica, Sequence
from grpo_rehearsal.standins.chunk_stream import ChunkStream
from grpo_rehearsal.standins.tokens import TokenTable
from grpo_rehearsal.virtual.scheduler import Scheduler, Timer
from grpo_worker.data.routed_experts import ExpertLayers, RoutedExperts


@dataclass(frozen=True, slots=True)
class Answers:
    """Everything that decides a response apart from time.

    ``length``: tokens of a response by its sampling seed. ``longest``: data.responseLength. A request that
    allows fewer tokens continues a response that has the others already. ``stream_interval``,
    ``incremental``: options of the server. ``experts``: of a model whose routing is replayed.
    """

    table: TokenTable
    length: Callable[[int], int]
    longest: int
    stream_interval: int = 1
    incremental: bool = False
    experts: ExpertLayers | None = None


@dataclass(eq=False, slots=True)
class Response:
    """One response under way. ``had``: tokens of earlier requests; ``sent``: new ones that the client has.

    ``versions``: (version, end) of consecutive new tokens. ``index``: within a request of several prompts.
    ``routed``: whether the client asks for routed experts.
    """

    rid: str
    seed: int
    sequence: Sequence
    had: int
    interval: int
    streamed: bool
    reason: str
    stream: ChunkStream
    index: int | None
    routed: bool = False
    replica: Replica | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    sent: int = 0


@dataclass(slots=True)
class EngineRecord:
    """Record of an engine.

    ``load``: (time, running, waiting). ``busy``: (begin, end). ``ends``: (time, tokens) of each response.
    ``routed_experts``: bytes that the pod keeps. ``references``: bytes of their references in responses.
    """

    tokens: int = 0
    routed_experts: int = 0
    references: int = 0
    load: list[tuple[float, int, int]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)


class StandInEngine:
    """One engine. ``version``: of its weights. ``slowdown``: a straggler takes so many times longer."""

    role = "engine"

    def __init__(
        self, name: str, scheduler: Scheduler, batch: Batch, answers: Answers, agent: str = ""
    ) -> None:
        """``agent``: URL of the pod's agent."""
        self.name, self._agent = name, agent
        self.version: int | None = None
        self.alive = True
        self.slowdown = 1.0
        self.record = EngineRecord()
        self.batch = batch
        self._scheduler = scheduler
        self._answers = answers
        self._paused = False
        self._responses: dict[Sequence, Response] = {}
        self._timer: Timer | None = None
        self._numbers = count()

    def handle(self, request: httpx.Request) -> Answer:
        """Answer a request of the server's HTTP interface."""
        if not self.alive:
            raise httpx.ConnectError(f"{self.name} is down", request=request)
        path = request.url.path
        if path == "/generate":
            return self._generate(json.loads(request.content))
        if path == "/abort_request":
            self._abort(json.loads(request.content))
            return Answer()
        if path == "/v1/loads":
            return Answer(body=json.dumps(self._load()).encode())
        return Answer(404, b'{"error": {"message": "Not Found"}}')

    def die(self) -> None:
        """Break every connection, and answer no more."""
        self.alive, self.version = False, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        responses, self._responses = list(self._responses.values()), {}
        self.batch.clear()
        for response in responses:
            response.stream.fail()
        self._note()

    def start(self) -> None:
        """Answer again, without weights."""
        self.alive = True

    def pause(self) -> None:
        """Stop generation after the current block, as the agent does for an update in place."""
        self._paused = True

    def resume(self, version: int) -> None:
        """Go on with the weights of a version."""
        self.version, self._paused = version, False
        self._wake()

    def _wake(self) -> None:
        if self._timer is not None or self._paused or not self.alive:
            return
        seconds = self.batch.start_block() * self.slowdown
        if seconds:
            now = self._scheduler.now
            self.record.busy.append((now, now + seconds))
            self._timer = self._scheduler.call_later(seconds, self._end_block)
        self._note()

    def _end_block(self) -> None:
        self._timer = None
        for sequence in self.batch.end_block():
            response = self._responses.get(sequence)
            if response is not None:
                self._progress(response)
        self._wake()

    def _progress(self, response: Response) -> None:
        sequence, spans, version = response.sequence, response.versions, self.version or 0
        if spans and spans[-1][0] == version:
            spans.pop()
        spans.append((version, sequence.tokens))
        if not sequence.missing:
            self.record.tokens += sequence.tokens
            self.record.ends.append((self._scheduler.now, response.had + sequence.tokens))
            del self._responses[sequence]
            self._send(response, finished=True)
        elif response.streamed and (
            not response.sent or sequence.tokens - response.sent >= response.interval
        ):
            self._send(response, finished=False)

    def _send(self, response: Response, *, finished: bool) -> None:
        first = response.sent if self._answers.incremental and response.streamed else 0
        tokens, had = response.sequence.tokens, response.had
        ended = finished and response.reason == "stop"
        ids, pairs = self._answers.table.encode(response.seed, had + first, had + tokens, ended=ended)
        reason = "null"
        if finished:
            detail = f'"matched":{self._answers.table.end}' if ended else f'"length":{tokens}'
            reason = f'{{"type":"{response.reason}",{detail}}}'
        spans = ",".join(f'{{"version":"{version}","end":{end}}}' for version, end in response.versions)
        versions = f'"weight_versions":[{spans}],' if finished else ""
        text = (
            f'{{"output_ids":{ids},"meta_info":{{"id":"{response.rid}","finish_reason":{reason},'
            f'"prompt_tokens":{response.sequence.prompt},"weight_version":"{self.version}",{versions}'
            f"{self._routed(response) if finished else ''}"
            f'"completion_tokens":{tokens},"cached_tokens":0,"output_token_logprobs":{pairs}}}}}'
        )
        response.sent = tokens
        response.stream.put(text, finished, response.index)

    def _routed(self, response: Response) -> str:
        """Return the field with the reference to a response's experts, as the plugin for SGLang makes it."""
        layers = self._answers.experts
        if not response.routed or layers is None:
            return ""
        tokens = response.sequence.prompt + response.sequence.tokens - 1
        key = f"{response.rid}-{response.seed}"
        reference = RoutedExperts(self._agent, key, tokens, layers.layers, layers.topk, 0)
        self.record.routed_experts += reference.nbytes
        text = base64.b64encode(json.dumps(reference.to_json()).encode()).decode()
        self.record.references += len(text)
        return f'"routed_experts":"{text}",'

    def _generate(self, body: dict[str, Any]) -> Answer:
        several = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if several else [body["input_ids"]]
        params = body["sampling_params"]
        params = params if isinstance(params, list) else [params] * len(prompts)
        streamed = bool(body.get("stream", False))
        stream = ChunkStream(streamed, several, len(prompts), self._gone)
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            rid = body.get("rid") or f"{self.name}-{next(self._numbers)}"
            response = self._response(
                len(prompt), own, str(rid), streamed, stream, index if several else None
            )
            response.routed = bool(body.get("return_routed_experts"))
            try:
                response.replica = self.batch.add(response.sequence, body.get("routed_dp_rank"))
            except ValueError as error:
                return Answer(400, json.dumps({"error": {"message": str(error)}}).encode())
            self._responses[response.sequence] = response
        self._scheduler.call_later(0, self._wake)  # requests of the same moment are admitted together
        return Answer(stream=stream)

    def _response(
        self, prompt: int, params: dict[str, Any], rid: str, streamed: bool, stream: ChunkStream,
        index: int | None,
    ) -> Response:  # fmt: skip
        answers, seed, allowed = self._answers, int(params["sampling_seed"]), int(params["max_new_tokens"])
        had = max(answers.longest - allowed, 0)
        missing = max(answers.length(seed) - had, 1)
        reason = "stop" if missing <= allowed else "length"
        interval = int(params.get("stream_interval") or answers.stream_interval)
        sequence = Sequence(prompt, min(missing, allowed))
        return Response(rid, seed, sequence, had, interval, streamed, reason, stream, index)

    def _gone(self, stream: ChunkStream) -> None:
        """Drop the responses of a client that closed its stream."""
        for response in [r for r in self._responses.values() if r.stream is stream]:
            self._drop(response)

    def _drop(self, response: Response) -> None:
        assert response.replica is not None, "a response under way has a place"
        response.replica.remove(response.sequence)
        del self._responses[response.sequence]

    def _abort(self, body: dict[str, Any]) -> None:
        prefix = str(body.get("rid", ""))
        for response in list(self._responses.values()):
            if body.get("abort_all") or (prefix and response.rid.startswith(prefix)):
                self._drop(response)
                text = (
                    f'{{"output_ids":[],"meta_info":{{"id":"{response.rid}","finish_reason":{{"type":"abort",'
                    f'"message":"Abort"}},"weight_version":"{self.version}","completion_tokens":0,'
                    f'"output_token_logprobs":[]}}}}'
                )
                response.stream.put(text, True, response.index)

    def _load(self) -> dict[str, Any]:
        return {
            "loads": [
                {
                    "dp_rank": number,
                    "num_running_reqs": len(replica.running),
                    "num_waiting_reqs": len(replica.waiting),
                    "num_used_tokens": replica.kv_used,
                    "max_total_num_tokens": replica.capacity.kv_tokens,
                    "token_usage": replica.kv_used / replica.capacity.kv_tokens,
                    "max_running_requests": replica.capacity.running,
                }
                for number, replica in enumerate(self.batch.replicas)
            ]
        }

    def _note(self) -> None:
        self.record.load.append((self._scheduler.now, self.batch.running, self.batch.waiting))
