"""Stand-in engine behind httpx clients, on virtual time."""

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import pytest

from grpo_rehearsal.network import Network, reachable
from grpo_rehearsal.standins.batching import Batch, Capacity, Speed
from grpo_rehearsal.standins.engine import Answers, StandInEngine
from grpo_rehearsal.standins.tokens import TokenTable, log_prob
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_rehearsal.virtual.threads import virtual_time

URL = "http://10.0.0.1:30000"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TABLE = TokenTable(1000, end=2)
TOKENS = 100


@pytest.fixture
def network() -> Iterator[Network]:
    with virtual_time(Scheduler()) as scheduler:
        network = Network(scheduler)
        with reachable(network):
            yield network


def engine_of(network: Network, *, incremental: bool = True, running: int = 64) -> StandInEngine:
    speed = Speed(decode=lambda running, context: 1.0, prefill=lambda tokens, length: 5.0)
    answers = Answers(TABLE, lambda seed: TOKENS, 200, incremental=incremental)
    batch = Batch(2, Capacity(running, 100_000, 16), speed)
    engine = StandInEngine("engine-0", network.scheduler, batch, answers)
    engine.version = 3
    network.hosts["10.0.0.1", 30000] = engine
    return engine


def body(seed: int = 7, tokens: int = 200, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "sampling_seed": seed, "stream_interval": 20}
    return {"input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True} | more


async def events(request: dict[str, Any], silence: float = 60) -> list[tuple[float, Any]]:
    async with (
        httpx.AsyncClient(timeout=silence, verify=NO_TLS) as client,
        client.stream("POST", f"{URL}/generate", json=request) as response,
    ):
        return [
            (time.monotonic(), json.loads(line.removeprefix("data: ")))
            async for line in response.aiter_lines()
            if line.startswith("data: {")
        ]


def test_a_whole_answer_comes_after_prefill_and_decoding(network: Network) -> None:
    engine_of(network)
    answer = httpx.post(f"{URL}/generate", json=body(), timeout=600).json()
    assert time.monotonic() == 5 + TOKENS
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == TOKENS
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert answer["output_ids"][-1] == 2 and 2 not in answer["output_ids"][:-1]
    assert answer["meta_info"]["weight_versions"] == [{"version": "3", "end": TOKENS}]
    pairs = answer["meta_info"]["output_token_logprobs"]
    assert [pair[1] for pair in pairs] == answer["output_ids"]
    assert pairs[0][0] == pytest.approx(log_prob(pairs[0][1]), abs=1e-6)


def test_a_list_of_prompts_is_answered_by_a_list(network: Network) -> None:
    engine_of(network)
    params = [body(seed)["sampling_params"] for seed in (1, 2)]
    request = {"input_ids": [[1], [1]], "sampling_params": params}
    answers = httpx.post(f"{URL}/generate", json=request, timeout=600).json()
    alone = httpx.post(f"{URL}/generate", json=body(2), timeout=600).json()
    assert len(answers) == 2 and answers[1]["output_ids"] == alone["output_ids"] != answers[0]["output_ids"]


@pytest.mark.parametrize("incremental", [True, False])
def test_streamed_events_arrive_while_the_engine_decodes(network: Network, incremental: bool) -> None:
    engine_of(network, incremental=incremental)
    seen = asyncio.run(events(body(stream=True)))
    times = [when for when, _ in seen]
    assert times == sorted(times) and times[0] < 30 and times[-1] == 5 + TOKENS
    ids = [event["output_ids"] for _, event in seen]
    whole = httpx.post(f"{URL}/generate", json=body(), timeout=600).json()["output_ids"]
    assert (list(chain.from_iterable(ids)) if incremental else ids[-1]) == whole
    assert [event["meta_info"]["finish_reason"] is None for _, event in seen] == [True] * (len(seen) - 1) + [
        False
    ]


def test_a_response_that_continues_elsewhere_is_the_same_one(network: Network) -> None:
    engine_of(network)
    whole = httpx.post(f"{URL}/generate", json=body(), timeout=600).json()["output_ids"]
    rest = httpx.post(f"{URL}/generate", json=body(tokens=200 - 40), timeout=600).json()["output_ids"]
    assert rest == whole[40:]


def test_thousands_of_streams_share_one_loop(network: Network) -> None:
    engine = engine_of(network, running=500)

    async def all_of_them() -> Any:
        return await asyncio.gather(*(events(body(seed, stream=True)) for seed in range(1000)))

    answers = asyncio.run(all_of_them())
    assert {len(answer[-1][1]["output_ids"]) > 0 for answer in answers} == {True}
    assert engine.record.tokens == 1000 * TOKENS
    assert network.scheduler.now == 5 + TOKENS
    assert network.bytes_by_link["engine>controller"] > 1000 * TOKENS * 10


def test_connections_break_when_the_engine_dies(network: Network) -> None:
    engine = engine_of(network)
    network.scheduler.call_at(50, engine.die)
    with pytest.raises(httpx.ReadError):
        asyncio.run(events(body(stream=True)))
    assert time.monotonic() == 50
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{URL}/generate", json=body())


def test_a_client_that_leaves_frees_its_place(network: Network) -> None:
    engine = engine_of(network)

    async def leave() -> None:
        async with asyncio.timeout(30):
            await events(body(stream=True))

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    assert engine.batch.running == 0


def test_an_aborted_request_ends_with_an_abort(network: Network) -> None:
    engine_of(network)

    async def both() -> Any:
        task = asyncio.create_task(events(body(stream=True, rid="r1")))
        await asyncio.sleep(30)
        async with httpx.AsyncClient() as client:
            await client.post(f"{URL}/abort_request", json={"rid": "r1"})
        return (await task)[-1]

    when, last = asyncio.run(both())
    assert when == 30 and last["meta_info"]["finish_reason"]["type"] == "abort"


def test_the_load_is_reported_by_replica(network: Network) -> None:
    engine_of(network, running=1)

    async def look() -> Any:
        tasks = [asyncio.create_task(events(body(s, stream=True, routed_dp_rank=1))) for s in (1, 2)]
        await asyncio.sleep(25)
        async with httpx.AsyncClient() as client:
            loads = (await client.get(f"{URL}/v1/loads")).json()["loads"]
        for task in tasks:
            task.cancel()
        return loads

    loads = asyncio.run(look())
    assert [(load["num_running_reqs"], load["num_waiting_reqs"]) for load in loads] == [(0, 0), (1, 1)]
    assert loads[1]["num_used_tokens"] == 3 + 16


def test_a_late_answer_is_a_read_timeout(network: Network) -> None:
    engine_of(network)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{URL}/generate", json=body(), timeout=10)
    assert time.monotonic() == 10


def test_a_stream_without_news_is_a_read_timeout(network: Network) -> None:
    engine_of(network)
    with pytest.raises(httpx.ReadTimeout):
        asyncio.run(events(body(stream=True), silence=18))
    assert time.monotonic() == 18  # the first block takes 21 s
    assert network.waits["engine/generate"].limit == 18
