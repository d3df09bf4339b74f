"""The emptiest rank is the one that a look at all ranks finds, and is found without that look."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.rollout.engine_load import RankLoad
from grpo_worker.rollout.engine_room import EngineRoom, RankRoom
from grpo_worker.rollout.placement import Place, Placement

loads = st.builds(
    RankLoad,
    running=st.integers(0, 6),
    waiting=st.integers(0, 1),
    used_tokens=st.integers(0, 90),
    max_tokens=st.sampled_from([0, 100]),
    max_running=st.integers(1, 6),
)
events = st.one_of(
    st.tuples(st.just("place"), st.integers(0, 3), st.integers(1, 60)),
    st.tuples(st.just("release"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("report"), st.lists(loads, min_size=1, max_size=4), st.just(0)),
)


def _emptiest_of_all(room: EngineRoom, tokens: int) -> tuple[int, float, int] | None:
    found = [
        (rank.level, rank.share, number)
        for number, rank in enumerate(room.ranks)
        if rank.level is not None and tokens <= rank.free_tokens
    ]
    return min(found, default=None)


@given(script=st.lists(events, max_size=80), first=st.lists(loads, min_size=1, max_size=4))
def test_the_emptiest_rank_is_found(script: list[tuple[str, int, int]], first: list[RankLoad]) -> None:
    room = EngineRoom([RankRoom(load) for load in first])
    taken: list[int] = []
    for event, value, tokens in script:
        if event == "report":
            room.report(value)  # type: ignore[arg-type]
        elif event == "release" and taken:
            room.release(taken.pop(value % len(taken)))
        elif event == "place":
            found = room.emptiest(tokens)
            assert found == _emptiest_of_all(room, tokens)
            if found is not None:
                room.take(found[2], tokens)
                taken.append(found[2])
    assert len(room._open) + len(room._narrow) <= 4 * len(room.ranks) + 17, "outdated entries are removed"


@pytest.mark.parametrize("kv_tokens", [0, 400_000], ids=["places", "KV cache"])
def test_the_work_of_a_sample_does_not_grow_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch, kv_tokens: int
) -> None:
    """Engines are full; whenever an answer ends, the next sample asks for a place."""
    few, many = (_looks(monkeypatch, ranks, kv_tokens) for ranks in (8, 64))
    assert many < 1.2 * few


def _looks(monkeypatch: pytest.MonkeyPatch, ranks: int, kv_tokens: int) -> int:
    """Return how often samples look at ranks. ``kv_tokens``: of each of 8 engines for 512 requests."""
    looks, free = 0, RankRoom.free_tokens.fget  # type: ignore[attr-defined]

    def counted(rank: RankRoom) -> float:
        nonlocal looks
        looks += 1
        return float(free(rank))

    names, running = [f"engine-{number}" for number in range(8)], list[Place]()
    load = RankLoad(max_running=512 // ranks, max_tokens=kv_tokens // ranks)
    placement = Placement(load)
    for name in names:
        placement.report(name, [load] * ranks)
    samples = itertools.count()
    while (place := placement.place(names, next(samples), 1000)) is not None:
        running.append(place)
    assert len(running) > 8 * 300
    placed = 0
    with monkeypatch.context() as patch:
        patch.setattr(RankRoom, "free_tokens", property(counted))
        for ended in running[:2000]:
            placement.release(ended)
            placed += placement.place(names, next(samples), 1000) is not None
    assert placed == (0 if kv_tokens else 2000), "the next report says which tokens are free"
    return looks
