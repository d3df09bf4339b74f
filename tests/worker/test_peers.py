"""A STALE engine gets the pool's version from the memory of a serving one, without trainers or controller."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.peer_offer import PeerOffer
from grpo_worker.weightsync.agent.region_source import RegionSource
from support.engine_server import JOB
from support.late_engine import UNPADDED, trainers
from support.peer_engines import PeerEngine, before_read, engines, generating

# On CPUs SGLang generates nothing with expert parallelism: it refuses the ids of other ranks' experts.
SHAPES = (
    pytest.param({"tensor_parallel": 1}, id="one rank"),
    pytest.param({"tensor_parallel": 2}, id="two ranks"),
)
pytestmark = pytest.mark.slow  # two engines of each shape start


@pytest.fixture(scope="module", params=SHAPES)
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[PeerEngine]]:
    with engines(tmp_path_factory.mktemp("pool"), UNPADDED, **request.param) as pair:
        yield pair


@pytest.fixture
def serving(pool: list[PeerEngine], two_versions: Path) -> PeerEngine:
    """The first engine, which serves version 1 of a job whose trainers are gone."""
    first = pool[0]
    first.replace_agent(JOB)
    assert load(first, two_versions, 1)["state"] == "SERVING"
    return first


@pytest.fixture
def stale(pool: list[PeerEngine]) -> PeerEngine:
    """The second engine, with the agent of a new pod and none of the version's bytes."""
    pool[1].replace_agent()
    return pool[1]


def load(engine: PeerEngine, two_versions: Path, version: int) -> dict[str, Any]:
    """Load a version into an engine from trainers, which end."""
    with trainers(two_versions) as sources:
        return engine.agent.sync(JOB, version, sources)


def test_an_engine_of_a_new_pod_gets_the_version_of_one_that_goes_on_generating(
    serving: PeerEngine, stale: PeerEngine
) -> None:
    before = serving.agent.status()
    with generating(serving.server) as answers:
        began = len(answers)
        stale.watch("SERVING")
        after = len(answers)
    status = stale.agent.status()
    assert (status["state"], status["weightVersion"], status["writer"]) == ("SERVING", 1, JOB)
    assert status["checksum"] == before["checksum"] == serving.agent.status()["checksum"]
    assert stale.weights() == serving.weights()
    assert serving.agent.status()["since"] == before["since"], "the peer was taken out of service"
    assert after > began and {answer["meta_info"]["weight_version"] for answer in answers} == {"1"}
    answers_of_both = [_greedy(engine) for engine in (serving, stale)]
    assert answers_of_both[0] == answers_of_both[1]


def _greedy(engine: PeerEngine) -> list[int]:
    params = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": list(range(10, 30)), "sampling_params": params}
    return list(httpx.post(f"{engine.server.url}/generate", json=body, timeout=60).json()["output_ids"])


def test_a_sync_of_the_same_version_does_not_touch_an_engine_that_a_peer_has_filled(
    serving: PeerEngine, stale: PeerEngine, two_versions: Path
) -> None:
    stale.watch("SERVING")
    before = stale.agent.status()
    with trainers(two_versions) as sources:
        # Another sidecar of the same trainers: the bytes are the same.
        after = stale.agent.sync(JOB, 1, sources)
    assert after["since"] == before["since"] and "send" not in after["seconds"]


def test_an_engine_that_restarts_while_the_trainers_are_away_is_filled_again(
    serving: PeerEngine, stale: PeerEngine
) -> None:
    stale.watch("SERVING")
    weights = stale.weights()
    stale.server.kill()
    stale.watch("RESTARTING")
    stale.server.start()
    stale.watch("SERVING")
    assert stale.agent.status()["weightVersion"] == 1 and stale.agent.status()["restarts"] == 1
    assert stale.weights() == weights == serving.weights()


def test_a_flipped_byte_on_the_way_is_noticed(
    serving: PeerEngine, stale: PeerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, reads = RegionSource.read, list[int]()

    def read(self: RegionSource, rank: int, first: int, end: int) -> tuple[memoryview, str]:
        data, digest = original(self, rank, first, end)
        reads.append(rank)
        if len(reads) == 3:
            data[len(data) // 2] ^= 4
        return data, digest

    with monkeypatch.context() as patch:
        patch.setattr(RegionSource, "read", read)
        error = stale.first_failure()
    assert "other bytes than the peer's rank has read" in error and len(reads) >= 3
    assert stale.agent.status()["state"] == "STALE"
    stale.watch("SERVING")
    assert stale.weights() == serving.weights()


def test_weights_that_are_not_those_that_the_peer_received_are_refused(
    serving: PeerEngine, stale: PeerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that changed in the peer's memory changes the checksum."""
    nbytes, total = serving.agent.status()["checksum"].split(":")
    original = Agent.offer

    def offer(self: Agent) -> PeerOffer:
        found = original(self).to_json()
        return PeerOffer.from_json(found | {"checksum": f"{nbytes}:{int(total, 16) ^ 1:016x}"})

    with monkeypatch.context() as patch:
        patch.setattr(Agent, "offer", offer)
        error = stale.first_failure()
    assert "version 1, commit: the peer's weights have the checksum" in error
    assert stale.agent.status()["state"] == "STALE"
    stale.watch("SERVING")


def test_a_version_that_changes_in_the_middle_is_not_mixed_with_the_next(
    serving: PeerEngine, stale: PeerEngine, two_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        reads = before_read(patch, 4, lambda: load(serving, two_versions, 2))
        error = stale.first_failure()
        assert len(reads) >= 4 and "changed" in error
        status = stale.agent.status()
        assert status["state"] == "STALE" and status["weightVersion"] is None
        stale.watch("SERVING")
    assert stale.agent.status()["weightVersion"] == 2
    assert stale.agent.status()["checksum"] == serving.agent.status()["checksum"]
    assert stale.weights() == serving.weights()


def test_a_rank_itself_reads_nothing_after_a_write_has_begun(
    serving: PeerEngine, stale: PeerEngine, two_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the peer's agent does not know of the write."""

    def write() -> None:
        control = serving.server.control()
        control.begin_update()
        control.end_update()

    with monkeypatch.context() as patch:
        reads = before_read(patch, 4, write)
        error = stale.first_failure()
    assert len(reads) >= 4 and "this engine's weights have changed, or it has ended" in error
    assert "hold no complete version" in stale.first_failure(), "it can be read no more"
    assert load(serving, two_versions, 2)["state"] == "SERVING"
    stale.watch("SERVING")
    assert stale.weights() == serving.weights()


@pytest.mark.fault(
    row="13",
    point="SIGKILL of the engine that fills another one, at the fourth read",
    witness="four reads, and the error of the engine that reads",
    compared="weights of both engines afterwards",
    partial="no bound; the trainers are away",
)
def test_a_peer_that_is_killed_in_the_middle_leaves_the_engine_stale_and_fillable(
    serving: PeerEngine, stale: PeerEngine, two_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        reads = before_read(patch, 4, serving.server.kill)
        error = stale.first_failure()
    assert len(reads) >= 4 and "weights have changed, or it has ended" in error
    serving.watch("RESTARTING")
    status = stale.agent.status()
    assert status["state"] == "STALE" and status["weightVersion"] is None
    serving.server.start()
    serving.watch("STALE")
    load(serving, two_versions, 1)
    stale.watch("SERVING")
    assert stale.weights() == serving.weights()


def test_only_weights_of_the_bound_job_are_taken(serving: PeerEngine, stale: PeerEngine) -> None:
    stale.agent.bind("other")
    stale.watch("STALE")
    for _ in range(5):
        stale.agent.watch()
    assert stale.agent.status()["state"] == "STALE"


def test_ranks_with_experts_of_their_own_get_only_what_they_keep(two_versions: Path, tmp_path: Path) -> None:
    with engines(tmp_path, UNPADDED, tensor_parallel=2, expert_parallel=2) as (first, second):
        first.replace_agent(JOB)
        load(first, two_versions, 1)
        second.watch("SERVING")
        assert second.agent.status()["checksum"] == first.agent.status()["checksum"]
        assert second.weights() == first.weights()
        nbytes, sent = (
            int(second.agent.status()["checksum"].split(":")[0]),
            second.agent._installer.load_report["sent"],
        )
    assert nbytes <= sum(sent) < 1.2 * nbytes and max(sent) < 0.6 * nbytes
