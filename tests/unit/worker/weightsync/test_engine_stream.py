"""Stream from an agent to the ranks of its engine: each gets its bytes, and none waits in vain."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_stream import EngineStream
from grpo_worker.weightsync.protocol.agent_stream import STREAM
from grpo_worker.weightsync.protocol.direct_load import MARK
from grpo_worker.weightsync.sglang_plugin.agent_stream import AgentStream
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError, StagedReceiver

RANKS, NAME = 3, f"{STREAM}0123456789ab"
DATA = np.random.default_rng(1).integers(0, 256, 3 << 20, dtype=np.uint8)


class Ranks(Engine):
    """Engine whose ranks connect when a group is joined."""

    def __init__(self, ranks: int = RANKS, name: str = NAME) -> None:
        super().__init__("http://127.0.0.1:9", 1)
        self._count, self._name = ranks, name
        self.streams: list[AgentStream] = []

    def join_group(self, address: str, port: int, *_: Any) -> str:
        self.streams = [AgentStream(address, port, self._name, rank) for rank in range(self._count)]
        return MARK


def never() -> bool:
    return False


def test_every_rank_receives_all_buckets_and_their_fingerprints() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 5)

    def receive(source: AgentStream) -> tuple[torch.Tensor, int, torch.Tensor, int]:
        first, second = torch.empty(len(DATA), dtype=torch.uint8), torch.empty(7, dtype=torch.uint8)
        source.read_into(first)
        one = source.read_fingerprint()
        source.read_into(second)
        return first, one, second, source.read_fingerprint()

    with ThreadPoolExecutor(RANKS) as threads:
        received = [threads.submit(receive, source) for source in engine.streams]
        stream.send(DATA[: 1 << 20], None, never)
        stream.send(DATA[1 << 20 :], -5, never)
        stream.send(DATA[:7], 2**62, never)
        for each in received:
            first, one, second, two = each.result(5)
            assert np.array_equal(first.numpy(), DATA) and np.array_equal(second.numpy(), DATA[:7])
            assert (one, two) == (-5, 2**62)
    stream.close()


def test_ranks_that_wait_are_released_when_the_agent_closes() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 5)
    receivers = [StagedReceiver(source) for source in engine.streams]
    flat = torch.empty(100, dtype=torch.uint8)
    pending = [receiver.receive(flat) for receiver in receivers]
    started = time.monotonic()
    stream.close()
    for each in pending:
        with pytest.raises(DirectLoadError, match="the agent ended the transfer"):
            each()
    assert time.monotonic() - started < 5


def test_a_rank_waits_for_a_byte_as_long_as_the_request_says() -> None:
    engine = Ranks(1)
    stream = EngineStream(engine, NAME, 1, 5)
    (source,) = engine.streams
    source.wait_at_most(0.2)
    started = time.monotonic()
    with pytest.raises(DirectLoadError, match="no bytes from the agent: TimeoutError"):
        source.read_into(torch.empty(1, dtype=torch.uint8))
    assert time.monotonic() - started < 5
    stream.close()


def test_a_rank_that_stops_reading_is_noticed() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 1)
    large = np.zeros(64 << 20, dtype=np.uint8)
    with pytest.raises(EngineError, match="ReadTimeout: a rank read nothing for 1 s"):
        stream.send(large, 0, never)
    stream.close()


def test_an_engine_that_gave_up_ends_the_wait_before_the_limit() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 600)
    given_up = threading.Event()
    threading.Timer(0.5, given_up.set).start()
    with pytest.raises(EngineError, match="stopped reading"):
        stream.send(np.zeros(64 << 20, dtype=np.uint8), 0, given_up.is_set)
    stream.close()


@pytest.mark.parametrize(
    ("ranks", "name", "missing"), [(2, NAME, 1), (RANKS, f"{STREAM}ffffffffffff", RANKS)]
)
def test_ranks_that_are_missing_or_do_not_know_the_name_are_not_served(
    ranks: int, name: str, missing: int
) -> None:
    with pytest.raises(EngineError, match=f"{missing} of {RANKS} ranks have not connected"):
        EngineStream(Ranks(ranks, name), NAME, RANKS, 5)


TABLE = np.array([[0, 0, 8, 0, 4], [3, 2, 4, 0, 1]], dtype=np.int32)


def test_the_agent_waits_for_a_rank_that_still_records_what_it_keeps() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 1)

    def tell(source: AgentStream) -> None:
        for _ in range(4):
            time.sleep(0.5)
            source.beat()
        source.send_kept(TABLE)

    with ThreadPoolExecutor(RANKS) as threads:
        told = [threads.submit(tell, source) for source in engine.streams]
        tables = stream.receive_kept(never)
        assert len(tables) == RANKS and all(np.array_equal(table, TABLE) for table in tables)
        for each in told:
            each.result(5)
    stream.close()


def test_a_rank_that_does_not_tell_what_it_keeps_is_named() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 1)
    for source in engine.streams[:2]:
        source.send_kept(TABLE)
    with pytest.raises(EngineError, match="ReadTimeout: rank 2 has sent nothing for 1 s"):
        stream.receive_kept(never)
    stream.close()


def test_a_rank_that_ends_instead_of_telling_releases_the_agent() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 600)
    engine.streams[0].close()
    with pytest.raises(EngineError, match="rank 0 of the engine has closed the stream"):
        stream.receive_kept(never)
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 5, "the threads of the other ranks have ended"


def test_each_rank_gets_its_own_bytes() -> None:
    engine = Ranks()
    stream = EngineStream(engine, NAME, RANKS, 5)

    def receive(source: AgentStream, size: int) -> torch.Tensor:
        flat = torch.empty(size, dtype=torch.uint8)
        source.read_into(flat)
        return flat

    with ThreadPoolExecutor(RANKS) as threads:
        received = [threads.submit(receive, s, 10 * (n + 1)) for n, s in enumerate(engine.streams)]
        stream.send_parts(lambda rank: [DATA[:10].data] * (rank + 1), never)
        for number, each in enumerate(received):
            assert np.array_equal(each.result(5).numpy(), np.tile(DATA[:10], number + 1))
    stream.close()
