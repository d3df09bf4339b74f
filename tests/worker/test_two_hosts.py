"""A real engine of two hosts gets staged versions through two agents: one transaction, whatever fails."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from grpo_worker.megatron.families.registry import family_of
from grpo_worker.weightsync.agent.further_parts import FurtherParts
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.trainer.publisher import publish
from support.gated_trainers import GatedTrainers
from support.late_engine import UNPADDED, WORLD
from support.stream_proxy import StreamProxy
from support.two_hosts import RANKS, TwoHosts, two_hosts
from support.weight_layouts import copy_version

pytestmark = pytest.mark.slow  # engines of two servers start
MIDDLE = 12  # number of a read of a version's bytes, by either agent


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts"), UNPADDED, expert_parallel=RANKS) as running:
        yield running


@pytest.fixture(scope="module")
def trainers(two_versions: Path) -> GatedTrainers:
    return GatedTrainers(two_versions)


@pytest.fixture(scope="module")
def undisturbed(engine: TwoHosts, trainers: GatedTrainers) -> dict[int, tuple[str, str]]:
    """Checksums of both versions, by the agents and by the engine, of loads without a fault."""
    found = {}
    for version in (1, 2):
        status = engine.sync(version, trainers.sources)
        found[version] = status["checksum"], engine.weights()
    assert found[1] != found[2]
    return found


def whole_tensors(root: Path, version: int) -> dict[str, torch.Tensor]:
    """Return the published tensors, put together from the ranks' slices."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(WORLD):
        folder = root / f"v{version}"
        manifest = Manifest.from_json((folder / f"rank-{rank}.json").read_text())
        data = torch.frombuffer(bytearray((folder / f"rank-{rank}.bin").read_bytes()), dtype=torch.uint8)
        for part in manifest.slices:
            size = list(part.shape)
            size[part.dim] = part.length
            whole = found.setdefault(part.name, torch.empty(part.shape))
            piece = data[part.start : part.start + part.nbytes].view(torch.float32).view(size)
            whole.narrow(part.dim, part.offset, part.length).copy_(piece)
    return found


def test_both_ranks_hold_the_weights_that_sglangs_own_loader_reads_from_files(
    engine: TwoHosts, two_versions: Path, undisturbed: dict[int, tuple[str, str]], tmp_path: Path
) -> None:
    """And each agent has read about half of the version, over the connections of its own host."""
    config = json.dumps(UNPADDED)
    for version in (1, 2):
        folder = tmp_path / f"hf-{version}"
        folder.mkdir()
        (folder / "config.json").write_text(config)
        save_file(whole_tensors(two_versions, version), folder / "model.safetensors")
        server = engine.servers[0]
        body = {"model_path": str(folder), "load_format": "safetensors"}
        answer = server.admin("/update_weights_from_disk", **body).json()
        assert answer["success"], answer
        assert engine.weights() == undisturbed[version][1]
    sent = engine.agent._installer.load_report["sent"]
    nbytes = int(undisturbed[2][0].split(":")[0])
    assert len(sent) == RANKS and nbytes <= sum(sent) < 1.2 * nbytes and max(sent) < 0.6 * nbytes
    own, elsewhere = engine.agent._fetcher.received, engine.agent._installer.received_elsewhere
    assert max(own, elsewhere) < 0.75 * nbytes, "an agent has read the other host's experts"


def load(engine: TwoHosts, trainers: GatedTrainers, version: int) -> dict[str, Any]:
    """Load a version, also if the engine has it already."""
    engine.sync(3 - version, trainers.sources)
    return engine.sync(version, trainers.sources)


def assert_loads(
    engine: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]], version: int
) -> None:
    """Check that the engine takes a version like one that was never disturbed."""
    status = engine.sync(version, trainers.sources)
    assert (status["state"], status["weightVersion"]) == ("SERVING", version), status
    assert (status["checksum"], engine.weights()) == undisturbed[version]


def assert_stale(engine: TwoHosts, servers: list[int]) -> None:
    """Check that the engine serves nothing, and that its servers were not restarted."""
    status = engine.agent.status()
    assert (status["state"], status["weightVersion"], status["restarts"]) == ("STALE", None, 0), status
    assert pids(engine) == servers


def pids(engine: TwoHosts) -> list[int]:
    return [pid for server in engine.servers for pid in server.processes()]


@pytest.fixture
def serving(
    engine: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]]
) -> Iterator[TwoHosts]:
    """The engine, which serves version 1, with agents that have noticed no fault yet."""
    engine.replace_agents()
    engine.watch("STALE")
    load(engine, trainers, 1)
    yield engine
    engine.watch("SERVING")


def proxied(patch: pytest.MonkeyPatch, at: int, cut: bool) -> list[StreamProxy]:
    """Put a proxy between the further host's agent and its rank."""
    made: list[StreamProxy] = []
    original = vars(FurtherParts)["ports"].fget

    def ports(self: FurtherParts) -> list[int]:
        made.extend(StreamProxy(port, at, cut) for port in original(self))
        return [proxy.port for proxy in made]

    patch.setattr(FurtherParts, "ports", property(ports))
    return made


@pytest.mark.fault(
    row="15",
    point="a bit flips on the stream to an engine's second host",
    witness="the proxy that flipped it; the message names rank and bucket",
    bound="in the same update",
    compared="checksum and weights of both ranks without a fault",
)
@pytest.mark.parametrize("at", [0, 1_000_000, 5_000_001])
def test_a_bit_that_flips_on_the_further_hosts_own_stream_leaves_the_engine_stale(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]], at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    servers = pids(serving)
    with monkeypatch.context() as patch:
        made = proxied(patch, at, cut=False)
        with pytest.raises(UpdateError, match=r"rank 1: bucket \d+: its bytes are not those that were sent"):
            serving.sync(2, trainers.sources)
    assert [proxy.harmed for proxy in made] == [True]
    assert_stale(serving, servers)
    assert_loads(serving, trainers, undisturbed, 2)


@pytest.mark.fault(
    row="17",
    point="SIGKILL of the second host's agent in the middle of an update",
    witness="the message names host and phase",
    compared="checksum and weights of both ranks without a fault",
    partial="no bound",
)
def test_a_further_hosts_agent_that_is_killed_in_the_middle_costs_the_update_alone(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]]
) -> None:
    """Neither the engine nor the first host's agent restarts; without the agent nothing is touched."""
    servers = pids(serving)
    with (
        trainers.before_read(MIDDLE, serving.further.end),
        pytest.raises(UpdateError, match=r"version 2, transfer, .*host 1 "),
    ):
        serving.sync(2, trainers.sources)
    assert_stale(serving, servers)
    with pytest.raises(UpdateError, match=r"version 2, plan: host 1 .*ConnectError"):
        serving.sync(2, trainers.sources)
    assert_stale(serving, servers)
    serving.further = serving.start_further()
    assert_loads(serving, trainers, undisturbed, 2)
    assert pids(serving) == servers


@pytest.mark.fault(
    row="17",
    point="SIGKILL of the first host's agent in the middle of an update",
    witness="the connection breaks at that read",
    bound="serves again in 180 s",
    compared="checksum and weights of both ranks without a fault",
)
def test_a_first_hosts_agent_that_is_killed_in_the_middle_costs_the_update_alone(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]]
) -> None:
    """The one that is back ends the part that is still open at the further host."""
    servers = pids(serving)
    first = serving.start_first()
    try:
        first.await_state("STALE", 60)
        assert first.sync(1, trainers.sources)["weightVersion"] == 1
        with trainers.before_read(MIDDLE, first.end), pytest.raises(httpx.HTTPError):
            first.sync(2, trainers.sources)
        first = serving.start_first()
        first.await_state("STALE", 60)
        deadline = time.monotonic() + 120
        while (status := first.sync(2, trainers.sources))["state"] != "SERVING":
            assert time.monotonic() < deadline, status
            time.sleep(1)
        assert (status["weightVersion"], status["restarts"]) == (2, 0)
        assert (status["checksum"], serving.weights()) == undisturbed[2]
        assert pids(serving) == servers
    finally:
        first.end()
        serving.first_process = None
    serving.replace_agents()
    serving.watch("STALE")
    assert_loads(serving, trainers, undisturbed, 1)


@pytest.mark.fault(
    row="17",
    point="SIGSTOP of the second host's agent in the middle of an update",
    witness="the message names the host or the missing bytes",
    bound="40 s",
    compared="checksum and weights of both ranks without a fault",
    partial="frozen, not dead",
)
def test_a_further_hosts_agent_that_freezes_is_named_within_its_time(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]]
) -> None:
    serving.replace_agents(timeout=6)
    serving.watch("STALE")
    load(serving, trainers, 1)
    servers, pid = pids(serving), serving.further.pid
    started = time.monotonic()
    with (
        trainers.before_read(MIDDLE, lambda: os.kill(pid, signal.SIGSTOP)),
        pytest.raises(UpdateError, match=r"version 2, .*(host 1 .*ReadTimeout|no bytes from the agent)"),
    ):
        serving.sync(2, trainers.sources)
    assert time.monotonic() - started < 40
    os.kill(pid, signal.SIGCONT)
    assert_stale(serving, servers)
    serving.watch("SERVING")  # by itself, from the trainers' memory
    assert (serving.agent.status()["checksum"], serving.weights()) == undisturbed[2]
    serving.replace_agents(timeout=60)
    serving.watch("STALE")
    assert_loads(serving, trainers, undisturbed, 2)


def test_a_connection_that_is_lost_between_the_further_host_and_its_rank_aborts_the_update(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    servers = pids(serving)
    with monkeypatch.context() as patch:
        made = proxied(patch, 3_000_000, cut=True)
        with pytest.raises(UpdateError, match=r"version 2, transfer, .*(host 1 |rank 1: )"):
            serving.sync(2, trainers.sources)
    assert [proxy.harmed for proxy in made] == [True]
    assert_stale(serving, servers)
    assert_loads(serving, trainers, undisturbed, 2)


@pytest.mark.fault(
    row="15",
    point="a bit of the trainers' copy changes: first, middle, last",
    witness="the message names the digest",
    bound="in the same update",
    compared="checksum and weights of both ranks without a fault",
)
@pytest.mark.parametrize("rank", range(WORLD))
def test_damage_in_the_trainers_memory_is_never_served(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]], rank: int,
    two_versions: Path,
) -> None:  # fmt: skip
    servers, blob = pids(serving), two_versions / "v2" / f"rank-{rank}.bin"
    good = blob.read_bytes()
    for at in (0, len(good) // 2, len(good) - 1):
        blob.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(UpdateError, match="another digest"):
            serving.sync(2, trainers.sources)
        blob.write_bytes(good)
        assert serving.agent.status()["weightVersion"] in (1, None) and pids(serving) == servers
        assert_loads(serving, trainers, undisturbed, 2)
        assert_loads(serving, trainers, undisturbed, 1)


@pytest.mark.fault(
    row="14",
    point="the trainers' copy goes away in the middle of an update",
    witness="HTTP 404 in the message",
    compared="checksum and weights of both ranks without a fault",
    partial="files go, no rank dies; no bound",
)
def test_trainers_that_are_lost_in_the_middle_leave_the_engine_stale_until_they_are_back(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]], two_versions: Path
) -> None:
    servers, away = pids(serving), two_versions / "away"
    with (
        trainers.before_read(MIDDLE, lambda: (two_versions / "v2").rename(away)),
        pytest.raises(UpdateError, match=r"version 2, transfer, .*HTTP 404"),
    ):
        serving.sync(2, trainers.sources)
    assert_stale(serving, servers)
    with pytest.raises(UpdateError, match="HTTP 404"):
        serving.agent.watch()
    away.rename(two_versions / "v2")
    serving.watch("SERVING")
    assert (serving.agent.status()["checksum"], serving.weights()) == undisturbed[2]


@pytest.mark.fault(
    row="13",
    point="SIGKILL of one host's server in the middle of an update",
    witness="the message names version and phase; one restart",
    bound="serves again in 400 s",
    compared="checksum and weights of both ranks without a fault",
    partial="no job that goes on",
)
@pytest.mark.parametrize("host", [0, 1])
def test_a_server_that_is_killed_in_the_middle_comes_back_with_the_version(
    serving: TwoHosts, trainers: GatedTrainers, undisturbed: dict[int, tuple[str, str]], host: int
) -> None:
    """One host's server costs the whole engine, which restarts in a new round; no agent restarts."""
    before, (_, *started) = serving.round(), serving.servers[host].processes()
    agents = serving.further.pid

    def kill() -> None:
        for pid in started:
            os.kill(pid, signal.SIGKILL)

    with trainers.before_read(MIDDLE, kill), pytest.raises(UpdateError, match="version 2, transfer"):
        serving.sync(2, trainers.sources)
    serving.watch("SERVING", 400)
    status = serving.agent.status()
    assert (status["weightVersion"], status["restarts"]) == (2, 1), status
    assert serving.round() != before and serving.further.pid == agents
    assert (status["checksum"], serving.weights()) == undisturbed[2]


def test_thirty_updates_with_the_same_weights_change_nothing(
    serving: TwoHosts, trainers: GatedTrainers, two_versions: Path, undisturbed: dict[int, tuple[str, str]]
) -> None:
    """Neither servers nor agents grow."""
    memory = 0
    for version in range(10, 40):
        copy_version(two_versions, 1, version)
        assert serving.sync(version, trainers.sources)["weightVersion"] == version
        shutil.rmtree(two_versions / f"v{version}")
        if version == 15:
            memory = resident(serving)
        if version % 10 == 9:
            assert serving.weights() == undisturbed[1][1]
    assert resident(serving) < 1.05 * memory + (16 << 20)


def resident(engine: TwoHosts) -> int:
    """Return the bytes of all servers and of the further host's agent."""
    return sum(psutil.Process(pid).memory_info().rss for pid in (*pids(engine), engine.further.pid))


def test_deltas_give_both_hosts_the_same_weights_as_whole_versions(
    serving: TwoHosts, trainers: GatedTrainers, tmp_path: Path, undisturbed: dict[int, tuple[str, str]]
) -> None:
    sources = GatedTrainers(tmp_path).sources
    parts = [weight_parts(rank) for rank in range(WORLD)]

    def publish_next(version: int) -> None:
        for rank, of_rank in enumerate(parts):
            for *_, tensor in of_rank:
                tensor.view(-1)[version::50] += 0.25
            publish(tmp_path, version, rank, WORLD, of_rank, deltas=True)

    publish_next(1)
    serving.replace_agents(deltas=True)
    serving.watch("STALE")
    every = serving.sync(1, sources)["receivedBytes"]
    changed = {}
    for version in (2, 3):
        publish_next(version)
        status = serving.sync(version, sources)
        assert 0 < status["receivedBytes"] < every / 4, "not only the changes were fetched"
        changed[version] = status["checksum"], serving.weights()
    serving.replace_agents(deltas=False)
    serving.watch("STALE")
    for version, found in changed.items():
        status = serving.sync(version, sources)
        assert (status["checksum"], serving.weights()) == found
    assert_loads(serving, trainers, undisturbed, 1)


def weight_parts(rank: int) -> list[Any]:
    """Return random weights of the model, of which each trainer rank has every other tensor."""
    generator = torch.Generator().manual_seed(7)
    shapes = sorted(family_of(UNPADDED).shapes(UNPADDED).items())
    whole = [torch.empty(shape).uniform_(-0.05, 0.05, generator=generator) for _, shape in shapes]
    pairs = list(zip(shapes, whole, strict=True))[rank::WORLD]
    return [(name, tuple(shape), 0, 0, tensor) for (name, shape), tensor in pairs]
