"""Model of continuous batching."""

import pytest

from grpo_rehearsal.standins.batching import Batch, Capacity, Sequence, Speed

# One token of all sequences takes a second, a prompt takes a second per 1000 tokens.
SPEED = Speed(decode=lambda running, context: 1.0, prefill=lambda tokens, length: tokens / 1000)


def batch(running: int = 8, kv_tokens: int = 100_000, replicas: int = 1, block: int = 10) -> Batch:
    return Batch(replicas, Capacity(running, kv_tokens, block), SPEED)


def run(engine: Batch) -> float:
    seconds = 0.0
    while block := engine.start_block():
        seconds += block
        engine.end_block()
    return seconds


def test_sequences_of_one_batch_run_at_the_same_time() -> None:
    engine = batch()
    for _ in range(8):
        engine.add(Sequence(1000, 100), None)
    assert run(engine) == 8 + 100


def test_the_queue_waits_for_a_place() -> None:
    engine = batch(running=2)
    sequences = [Sequence(0, 50) for _ in range(4)]
    for sequence in sequences:
        engine.add(sequence, None)
    engine.start_block()
    assert (engine.running, engine.waiting) == (2, 2)
    assert run(engine) == 100  # the begun block is started again
    assert all(sequence.tokens == 50 for sequence in sequences)


def test_requests_go_to_the_named_replica_and_the_fullest_sets_the_pace() -> None:
    pace = Speed(decode=lambda running, context: running, prefill=lambda tokens, length: 0.0)
    engine = Batch(2, Capacity(8, 1000, 10), pace)
    for replica in (0, 0, 0, 1):
        engine.add(Sequence(1, 10), replica)
    assert [len(r.waiting) for r in engine.replicas] == [3, 1]
    assert engine.start_block() == 30
    with pytest.raises(ValueError, match="routed_dp_rank=2"):
        engine.add(Sequence(1, 1), 2)


def test_without_a_name_the_least_loaded_replica_takes_a_request() -> None:
    engine = batch(replicas=3)
    for _ in range(7):
        engine.add(Sequence(1, 1), None)
    assert [len(r.waiting) for r in engine.replicas] == [3, 2, 2]


def test_a_full_kv_cache_admits_nobody_and_retracts_the_shortest() -> None:
    engine = batch(kv_tokens=600, block=50)
    sequences = [Sequence(100, 250) for _ in range(5)]
    for sequence in sequences:
        engine.add(sequence, None)
    engine.start_block()
    assert engine.running == 4
    while engine.start_block():
        engine.end_block()
        assert engine.replicas[0].kv_used <= 600
    assert engine.replicas[0].retractions > 0
    assert all(sequence.tokens == 250 for sequence in sequences)


def test_a_sequence_that_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the KV cache of 600"):
        batch(kv_tokens=600).add(Sequence(500, 200), None)
