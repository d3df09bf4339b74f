"""Messages between the agents of an engine's hosts, and the bytes that each of them counts."""

import random

import numpy as np
import pytest

from grpo_worker.weightsync.agent.part_messages import (
    PartPhase,
    PartRequest,
    PartState,
    table_bytes,
    table_from,
)
from grpo_worker.weightsync.planner.rank_parts import part_of, table_of
from grpo_worker.weightsync.planner.regions import Box, Tensor
from grpo_worker.weightsync.protocol.agent_stream import place_of_rank, places_of_hosts


@pytest.mark.parametrize("seed", range(30))
def test_what_another_host_counts_is_left_out_byte_for_byte(seed: int) -> None:
    rng = random.Random(seed)
    tensors = [Tensor(rng.randint(1, 12), rng.randint(1, 9), "bfloat16") for _ in range(3)]

    def drawn() -> dict[str, list[Box]]:
        found: dict[str, list[Box]] = {}
        for number, tensor in enumerate(tensors):
            for _ in range(rng.randint(0, 3)):
                rows = sorted(rng.sample(range(tensor.rows + 1), 2))
                columns = sorted(rng.sample(range(tensor.columns + 1), 2))
                found.setdefault(f"t{number}", []).append(Box(*rows, *columns))
        return found

    own, other = drawn(), drawn()
    names = ["before", "t0", "t1", "t2"]
    part = part_of([table_of(names, own)], 1, tensors, table_of(names, other))
    for number, tensor in enumerate(tensors):
        wanted = np.zeros((tensor.rows, 2 * tensor.columns), dtype=int)
        for kept, value in ((own, 1), (other, 0)):
            for box in kept.get(f"t{number}", ()):
                wanted[box.top : box.bottom, 2 * box.left : 2 * box.right] = value
        found = np.zeros_like(wanted)
        for band in part.bands.get(number, ()):
            for left, right in band.columns:
                found[band.top : band.bottom, left:right] += 1
        assert (found == wanted).all()


def test_messages_survive_the_wire() -> None:
    request = PartRequest("grpo-stream-1", 3, "plan", {0: "http://a", 1: "http://b"}, ["d"], 2, 4)
    assert PartRequest.from_json(request.to_json()) == request and not request.from_peer
    state = PartState(PartPhase.DONE, 5, 6, 7, -8, (9, 10))
    assert PartState.from_json(state.to_json()) == state
    table = np.arange(15, dtype=np.int32).reshape(3, 5)
    assert np.array_equal(table_from(table_bytes(table)), table)
    with pytest.raises(ValueError, match="reshape"):
        table_from(b"1234")


def test_each_rank_connects_to_the_agent_of_its_own_host() -> None:
    address = places_of_hosts([7, 8])
    assert [place_of_rank(address, 7, rank, 4)[1] for rank in range(4)] == [7, 7, 8, 8]
    assert place_of_rank("10.0.0.7", 5, 3, 4) == ("10.0.0.7", 5)
