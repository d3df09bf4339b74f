"""The weight plane under stress with a real engine: repeated, damaged and stalled updates."""

import contextlib
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.agent.engine_stream import EngineStream
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.trainer.publisher import publish
from support.engine_server import JOB, URL, Server, generate, serve, watch_until
from support.ranks.launcher import run as run_on_ranks
from support.weight_layouts import LAYOUTS, copy_version, from_disk, rewrite

VERSIONS = 3
PROMPT = list(range(20, 60))


def new_agent(server: Server, timeout: float = 30, deltas: bool = False) -> Agent:
    engine, bucket = server.control(timeout), 64 << 10
    fetcher = Fetcher(timeout, WholeBlobs(timeout, deltas=True) if deltas else None)
    return Agent("engine-0", engine, 1, bucket_bytes=bucket, timeout=timeout, writer=JOB, fetcher=fetcher)


@pytest.fixture(scope="module")
def agent(server: Server) -> Agent:
    agent = new_agent(server)
    watch_until(agent, "STALE", server)
    return agent


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish version 1 of a TP2 x EP2 trainer."""
    root = tmp_path_factory.mktemp("versions")
    world, layout = LAYOUTS["TP2 EP2"]
    run_on_ranks("weight_cases:publish_versions", world, root=str(root), layout=layout, versions=1)
    return root / "update-1"


@pytest.fixture(scope="module")
def sources(versions: Path) -> dict[int, str]:
    return serve(versions)


def test_every_tensor_equals_the_exported_checkpoint_after_each_update(
    agent: Agent, server: Server, tmp_path: Path
) -> None:
    """The first load is traced, the second and third are replayed: each must equal the files on disk.

    test_direct_transfer.py covers other layouts; the assembled buckets are the same.
    """
    name = "TP2 EP2"
    world, layout = LAYOUTS[name]
    run_on_ranks("weight_cases:publish_versions", world, root=str(tmp_path), layout=layout, versions=VERSIONS)
    seen = set()
    for version in range(1, VERSIONS + 1):
        sources = serve(tmp_path / f"update-{version}", world)
        assert agent.sync(JOB, version, sources)["state"] == "SERVING"
        ours = server.control().checksum()
        seen.add(ours)
        from_disk(server, tmp_path / f"hf-{version}")
        assert server.control().checksum() == ours, (
            f"version {version} of {name} is another inside the engine"
        )
    assert len(seen) == VERSIONS, "the versions do not differ"


def test_fifty_updates_with_the_same_weights_change_nothing(
    agent: Agent, versions: Path, sources: dict[int, str], server: Server
) -> None:
    """As with a learning rate of 0: log-probs stay bitwise equal, and memory does not grow."""
    agent.sync(JOB, 1, sources)
    before, memory = _log_probs(), 0
    for version in range(2, 52):
        copy_version(versions, version - 1, version)
        assert agent.sync(JOB, version, sources)["weightVersion"] == version
        shutil.rmtree(versions / f"v{version - 1}")
        if version == 11:
            memory = _memory(server)
        if version % 10 == 1:
            assert _log_probs() == before, f"drift at version {version}"
    assert _memory(server) < memory * 1.05 + (16 << 20), "the engine keeps memory of past updates"
    (versions / "v51").rename(versions / "v1")
    rewrite(versions / "v1", 1)


def _log_probs() -> list[float]:
    meta = generate(PROMPT, temperature=0.0)["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]


def _memory(server: Server) -> int:
    own = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in (own, *own.children(recursive=True)))


def test_the_prefix_cache_of_old_weights_is_not_reused(
    agent: Agent, server: Server, versions: Path, sources: dict[int, str]
) -> None:
    """A cached prefix is computed again after an update."""
    agent.sync(JOB, 1, sources)
    generate(PROMPT)
    _other_weights(versions, 60)
    agent.sync(JOB, 60, sources)
    body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
    body["return_logprob"] = True  # of the answer alone: those of the prompt would bypass the cache
    first = httpx.post(f"{URL}/generate", json=body, timeout=60).json()
    server.admin("/flush_cache").raise_for_status()
    again = httpx.post(f"{URL}/generate", json=body, timeout=60).json()
    assert first["meta_info"]["cached_tokens"] == 0
    assert first["meta_info"]["output_token_logprobs"] == again["meta_info"]["output_token_logprobs"]


def _other_weights(root: Path, version: int) -> None:
    """Publish version 1's layout with all weights halved."""
    for rank in (0, 1):
        publish(root / "other", version, rank, 2, _halved(root / "v1", rank))
    shutil.move(str(root / "other" / f"v{version}"), str(root / f"v{version}"))


def _halved(folder: Path, rank: int, share: float = 1.0) -> list[Any]:
    """Return a published rank's parts with a share of all weights halved."""
    generator = torch.Generator().manual_seed(rank)
    manifest = Manifest.from_json((folder / f"rank-{rank}.json").read_text())
    data = torch.frombuffer(bytearray((folder / f"rank-{rank}.bin").read_bytes()), dtype=torch.uint8)
    parts: list[Any] = []
    for part in manifest.slices:
        size = list(part.shape)
        size[part.dim] = part.length
        tensor = data[part.start : part.start + part.nbytes].view(torch.float32).view(size)
        changed = torch.rand(size, generator=generator) < share
        parts.append((part.name, part.shape, part.dim, part.offset, tensor.where(~changed, tensor * 0.5)))
    return parts


def test_deltas_give_the_same_weights_as_full_versions(
    server: Server, versions: Path, tmp_path: Path
) -> None:
    """Deltas are small; damage of the base and a skipped version are repaired by full blobs."""
    shutil.copytree(versions / "v1", tmp_path / "v1")
    sources = serve(tmp_path)
    agent, whole = new_agent(server, deltas=True), new_agent(server)
    for each in (agent, whole):
        watch_until(each, "STALE", server)

    def next_version(version: int) -> None:
        for rank in (0, 1):
            parts = _halved(tmp_path / f"v{version - 1}", rank, 0.02)
            publish(tmp_path, version, rank, 2, parts, deltas=True)

    agent.sync(JOB, 1, sources)
    every = agent.received()
    next_version(2)
    agent.sync(JOB, 2, sources)
    assert 0 < agent.received() < every / 8
    _same_as_with_all_bytes(agent, whole, server, sources, 2)
    assert agent._fetcher._whole is not None
    agent._fetcher._whole._blobs[0][100] ^= 1
    next_version(3)
    agent.sync(JOB, 3, sources)
    assert every / 8 < agent.received() <= every
    _same_as_with_all_bytes(agent, whole, server, sources, 3)
    next_version(4)
    next_version(5)
    agent.sync(JOB, 5, sources)
    assert agent.received() == every
    _same_as_with_all_bytes(agent, whole, server, sources, 5)


def _same_as_with_all_bytes(
    agent: Agent, whole: Agent, server: Server, sources: dict[int, str], version: int
) -> None:
    assert agent.status()["weightVersion"] == version
    ours = server.control().checksum()
    whole.sync(JOB, version, sources)
    assert server.control().checksum() == ours


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flip one bit of the third bucket on its way into the engine."""
    original, count = EngineStream.send, [0]

    def send(self: EngineStream, data: Any, fingerprint: int | None, given_up: Callable[[], bool]) -> None:
        count[0] += fingerprint is not None
        if count[0] == 3 and fingerprint is not None:
            data = data.copy()
            data[len(data) // 2] ^= 1
        original(self, data, fingerprint, given_up)

    monkeypatch.setattr(EngineStream, "send", send)
    yield
    assert count[0] > 3, "there was no third bucket"


@pytest.mark.fault(
    row="15",
    point="a bit flips in the third bucket on its way into a real engine",
    witness="the message names the bucket",
    bound="in the same update; repaired by the next look",
    partial="the version is checked after the repair, not its weights",
)
def test_a_bit_flipped_on_the_way_into_the_engine_is_detected(
    agent: Agent, versions: Path, sources: dict[int, str], damaged: None
) -> None:
    assert agent.status()["weightVersion"] == 60
    with pytest.raises(UpdateError, match="bucket 2: its bytes are not those that were sent"):
        agent.sync(JOB, 1, sources)
    status = agent.status()
    assert status["state"] == "STALE" and status["weightVersion"] is None
    agent.watch()  # from the trainers' memory again
    assert agent.status()["weightVersion"] == 1


@pytest.mark.fault(
    row="15",
    point="the trainers publish two versions while an engine reads one",
    witness="the message names bucket and digest",
    bound="in the same update",
    compared="checksum after loading the whole version another way",
    partial="no flipped bit",
)
def test_a_version_overwritten_while_it_is_streamed_is_never_served_and_the_newer_one_is(
    agent: Agent, server: Server, versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainers publish two more versions while the engine loads the first."""
    shutil.copytree(versions / "v1", tmp_path / "v1")
    sources, original, count = serve(tmp_path), EngineStream.send, [0]

    def send(self: EngineStream, *arguments: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            for version in (2, 3):
                for rank in (0, 1):
                    parts = _halved(tmp_path / f"v{version - 1}", rank)
                    publish(tmp_path, version, rank, 2, parts)
        original(self, *arguments)

    agent.sync(JOB, 60, serve(versions))  # an engine that serves version 1 would not be touched
    monkeypatch.setattr(EngineStream, "send", send)
    with pytest.raises(UpdateError, match=r"version 1, transfer, bucket \d+ of \d+: .*(HTTP 404|digest)"):
        agent.sync(JOB, 1, sources)
    status = agent.status()
    assert status["state"] == "STALE" and status["weightVersion"] is None
    with pytest.raises(UpdateError, match="HTTP 404"):
        agent.watch()
    assert agent.sync(JOB, 3, sources)["weightVersion"] == 3
    ours = server.control().checksum()
    whole = new_agent(server, deltas=True)
    watch_until(whole, "STALE", server)
    _same_as_with_all_bytes(agent, whole, server, sources, 3)
    assert server.control().checksum() == ours


@pytest.mark.fault(
    row="16",
    point="the plan counts other tensors than the engine has",
    witness="the message names the bucket",
    bound="in the same update",
    partial="the engine was not restarted with another layout; nothing compared",
)
def test_a_plan_that_does_not_fit_is_refused(
    agent: Agent, sources: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.sync(JOB, 1, sources)
    original = StagedVersion.direct_load

    def fewer(self: Any, *args: Any, **kwargs: Any) -> DirectLoad:
        load = original(self, *args, **kwargs)
        return replace(load, counts=load.counts[:-1])

    monkeypatch.setattr(StagedVersion, "direct_load", fewer)
    with pytest.raises(UpdateError, match=r"transfer, bucket \d+ of \d+: .*buckets of \d+ tensors for"):
        agent.sync(JOB, 60, sources)
    assert agent.status()["state"] == "STALE"
    monkeypatch.undo()
    assert agent.sync(JOB, 60, sources)["state"] == "SERVING"


@pytest.mark.fault(
    row="11,13",
    point="SIGSTOP of an engine's processes at a bucket of an update",
    witness="the message names phase, bucket and timeout",
    bound="named in 25 s, serves again in 90 s",
    partial="the version is checked, not its weights",
)
@pytest.mark.slow  # waits for deadlines
def test_a_frozen_engine_is_named_with_phase_and_bucket_and_recovers(
    server: Server, sources: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is frozen during a transfer: the agent gives up at its deadline and repairs it later."""
    agent, original = new_agent(server, timeout=5), EngineStream.send
    stopped: list[int] = []
    watch_until(agent, "STALE", server)
    agent.sync(JOB, 1, sources)
    processes = [p.pid for p in psutil.Process(server.process.pid).children(recursive=True)]

    def send(self: EngineStream, *arguments: Any) -> None:
        if not stopped:
            stopped.extend([server.process.pid, *processes])
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        original(self, *arguments)

    monkeypatch.setattr(EngineStream, "send", send)
    started = time.monotonic()
    with pytest.raises(UpdateError, match=r"engine-0: version 60, transfer, bucket \d+ of \d+: .*Timeout"):
        agent.sync(JOB, 60, sources)
    assert time.monotonic() - started < 25
    assert agent.status()["state"] == "RESTARTING" and agent.status()["weightVersion"] is None
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 90
    while agent.status()["state"] != "SERVING":
        assert time.monotonic() < deadline, agent.status()
        try:
            agent.watch()
        except UpdateError:
            time.sleep(0.5)  # the open session of the failed update is closed by this attempt
        time.sleep(0.2)
    assert agent.status()["weightVersion"] == 60


@pytest.mark.fault(
    row="8",
    point="a source sends 2 KiB/s",
    witness="the message names the time limit",
    bound="10 s",
    partial="only a low rate; nothing compared",
)
def test_a_slow_source_does_not_block_the_engine(server: Server, versions: Path) -> None:
    """Bytes arrive too slowly: the update ends at its deadline and the engine keeps serving."""
    agent = new_agent(server, timeout=3)
    watch_until(agent, "STALE", server)
    agent.sync(JOB, 1, serve(versions))
    with SlowSource(versions) as url:
        started = time.monotonic()
        with pytest.raises(UpdateError, match=r"version 60, plan: .* bytes within the time limit"):
            agent.sync(JOB, 60, dict.fromkeys((0, 1), url))
        assert time.monotonic() - started < 10
    assert (agent.status()["state"], agent.status()["weightVersion"]) == ("SERVING", 1)


class SlowSource:
    """A trainer's agent behind a line of 2 KiB per second."""

    def __init__(self, root: Path) -> None:
        self._root, self._socket = root, socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> str:
        threading.Thread(target=self._run, daemon=True).start()
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            while request := connection.recv(4096).decode():
                self._answer_one(connection, request)
        except OSError:
            pass
        connection.close()

    def _answer_one(self, connection: socket.socket, request: str) -> None:
        version, file = request.split()[1].removeprefix("/v1/weights/").split("/")
        data = (self._root / f"v{version}" / f"rank-{file}").read_bytes()
        wanted = re.search(r"bytes=(\d+)-(\d+)", request)
        data = data[int(wanted[1]) : int(wanted[2]) + 1] if wanted else data
        status = b"206 Partial Content" if wanted else b"200 OK"
        connection.sendall(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(data)))
        if not wanted:
            connection.sendall(data)
        while data and wanted:
            connection.sendall(data[:512])
            data = data[512:]
            time.sleep(0.25)


@pytest.mark.fault(
    row="11",
    point="a real engine's scheduler is suspended, its server answers",
    witness="the calls time out, the agent says silent",
    bound="3 s for a call; serves again in 30 s",
    partial="while no answers are generated; nothing compared",
)
def test_a_frozen_scheduler_gets_no_more_calls_and_recovers(server: Server, sources: dict[int, str]) -> None:
    """Its server keeps answering. A call that timed out must not delay later ones."""
    agent = new_agent(server, timeout=3)
    watch_until(agent, "STALE", server)
    agent.sync(JOB, 1, sources)
    (scheduler,) = [
        p for p in psutil.Process(server.process.pid).children(recursive=True) if "scheduler" in p.name()
    ]
    scheduler.suspend()
    with pytest.raises(UpdateError, match=r"version 60, prepare: /init_weights_update_group: ReadTimeout"):
        agent.sync(JOB, 60, sources)
    with pytest.raises(UpdateError, match=r"version 60, plan: /server_info: ReadTimeout"):
        agent.sync(JOB, 60, sources)
    assert agent.status()["silent"] and server.control().alive() and agent.engine_lives()
    scheduler.resume()
    watch_until_heard(agent)
    assert agent.sync(JOB, 60, sources)["state"] == "SERVING"


def watch_until_heard(agent: Agent) -> None:
    deadline = time.monotonic() + 30
    while agent.status()["silent"] or agent.status()["state"] != "SERVING":
        assert time.monotonic() < deadline, agent.status()
        with contextlib.suppress(UpdateError, EngineError):
            agent.watch()
        time.sleep(0.2)
