"""A STALE engine gets the version of the newest checkpoint when trainers and peers are away."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.checkpointing.store import MARKER, complete, prune
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.file_reader import FileReader
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.protocol.stored_version import manifests_in, stored_blob
from support.engine_server import JOB, Server, free_port, serve, watch_until
from support.stored_versions import RANKS, JobStore

FIRST, SECOND = 2, 4  # steps with a checkpoint


@dataclass(frozen=True, slots=True)
class Trained:
    """A job whose trainers ended after step 3, and after step 4 in a second attempt.

    ``first``, ``second``: its store after each. ``memory``: that of the trainers' pods of each attempt.
    ``digests``: of the versions of each attempt, by rank.
    """

    first: JobStore
    second: JobStore
    memory: list[Path]
    digests: list[list[list[str]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("job")
    first, memory = JobStore(root / "first"), [root / "memory-1", root / "memory-2"]
    digests = [first.train(memory[0], FIRST + 1, FIRST)]
    second = first.copy(root / "second")
    digests.append(second.train(memory[1], SECOND, SECOND))
    return Trained(first, second, memory, digests)


@pytest.fixture
def store(trained: Trained, tmp_path: Path) -> JobStore:
    """A store whose newest checkpoint is of step 2, and whose job starts again from there."""
    store = trained.first.copy(tmp_path / "store")
    store.begin_attempt()
    return store


@pytest.fixture(scope="module")
def versions(server: Server, trained: Trained) -> dict[int, tuple[str, str]]:
    """Load versions 2, 4 and 3 from the trainers' memory, and return the agent's and the engine's checksum.

    The engine has version 3 then, which no checkpoint has.
    """
    agent = trained.first.agent(server)
    watch_until(agent, "STALE", server)
    loaded = {}
    for version, memory in ((FIRST, 0), (SECOND, 1), (FIRST + 1, 0)):
        status = agent.sync(JOB, version, serve(trained.memory[memory]), attempt=2)
        assert status["state"] == "SERVING", status
        loaded[version] = status["checksum"], server.control().checksum()
    assert len({weights for _, weights in loaded.values()}) == 3
    return loaded


def assert_filled(agent: Agent, server: Server, version: int, versions: dict[int, tuple[str, str]]) -> None:
    watch_until(agent, "SERVING", server, 60)
    status = agent.status()
    assert (status["weightVersion"], status["checksum"]) == (version, versions[version][0])
    assert server.control().checksum() == versions[version][1]


def failure(agent: Agent) -> str:
    """Let the agent watch until an update fails; return the error. The engine serves nothing then."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            agent.watch()
        except UpdateError as error:
            status = agent.status()
            assert (status["state"], status["weightVersion"]) == ("STALE", None)
            return str(error)
        assert agent.status()["state"] != "SERVING", "the update did not fail"
        time.sleep(0.1)
    raise AssertionError(f"no update: {agent.status()}")


def assert_stays_stale(agent: Agent, seconds: float) -> None:
    """Let the agent watch for longer than between two looks into the store."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        agent.watch()
        assert agent.status()["state"] == "STALE"
        time.sleep(0.2)


def test_an_engine_without_trainers_and_peers_gets_the_version_of_the_checkpoint(
    server: Server, store: JobStore, trained: Trained, versions: dict[int, tuple[str, str]]
) -> None:
    agent = store.agent(server)
    assert_filled(agent, server, FIRST, versions)
    before = agent.status()
    assert before["stagedVersion"] is None, "it is in no trainer's memory"

    # Trainers that start from the checkpoint publish the same bytes.
    again = [digests[0] for digests in trained.digests[1]]
    assert again == [digests[FIRST] for digests in trained.digests[0]]


def test_trainers_that_come_back_with_the_same_version_do_not_touch_the_engine(
    server: Server, store: JobStore, trained: Trained, versions: dict[int, tuple[str, str]]
) -> None:
    agent = store.agent(server)
    assert_filled(agent, server, FIRST, versions)
    before = agent.status()
    after = agent.sync(JOB, FIRST, serve(trained.memory[0]), attempt=2)
    assert after["since"] == before["since"] and "send" not in after["seconds"]
    assert after["stagedVersion"] == FIRST, "it can be loaded again from there"


def test_a_version_older_than_the_jobs_newest_is_not_served(
    server: Server, trained: Trained, versions: dict[int, tuple[str, str]], tmp_path: Path
) -> None:
    """The trainers have finished step 3 since the checkpoint, and may be about to publish."""
    store = trained.first.copy(tmp_path / "store")
    agent = store.agent(server)
    watch_until(agent, "STALE", server, 60)
    assert_stays_stale(agent, 5)
    store.begin_attempt()  # those trainers have ended, and version 3 with them
    assert_filled(agent, server, FIRST, versions)


def test_an_agent_that_knows_a_newer_version_of_the_attempt_waits_for_it(
    server: Server, trained: Trained, versions: dict[int, tuple[str, str]], tmp_path: Path
) -> None:
    """Also if the store does not show the step yet."""
    store = trained.first.copy(tmp_path / "store")
    agent = store.agent(server)
    watch_until(agent, "STALE", server, 60)
    store.finish_steps(1, FIRST)
    gone = dict.fromkeys(range(RANKS), "http://127.0.0.1:9")
    with pytest.raises(UpdateError, match="http://127"):
        agent.sync(JOB, FIRST + 1, gone, attempt=1)
    assert_stays_stale(agent, 5)
    store.begin_attempt()
    assert_filled(agent, server, FIRST, versions)


@pytest.mark.parametrize("kind", ["blob", "manifest"])
def test_a_flipped_bit_is_named_and_never_served(
    kind: str, server: Server, store: JobStore, versions: dict[int, tuple[str, str]]
) -> None:
    folder = store.weights(FIRST)
    file = stored_blob(folder, 1)
    if kind == "manifest":
        file = next(found for found in manifests_in(folder) if found.name.startswith("rank-1-"))
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) * 2 // 3] ^= 32
    file.write_bytes(damaged)
    agent = store.agent(server)
    error = failure(agent)
    assert f"{file}" in error and "another digest" in error
    assert_stays_stale(agent, 5)  # nor is it read again and again
    assert agent.status()["reason"].endswith(error)
    file.write_bytes(whole)
    assert_filled(store.agent(server), server, FIRST, versions)


def test_a_missing_file_is_named_and_read_when_it_is_there(
    server: Server, store: JobStore, versions: dict[int, tuple[str, str]]
) -> None:
    blob = stored_blob(store.weights(FIRST), 1)
    away = blob.rename(blob.with_suffix(".away"))
    agent = store.agent(server)
    assert f"No such file or directory: '{blob}'" in failure(agent)
    away.rename(blob)
    assert_filled(agent, server, FIRST, versions)


def during_read(patch: pytest.MonkeyPatch, number: int, call: Callable[[], Any]) -> list[str]:
    """Call ``call`` before the range of that number is read, once; return the list of files read."""
    reads: list[str] = []
    original, lock = FileReader.get, threading.Lock()

    def get(self: FileReader, url: str, part: tuple[int, int]) -> Any:
        with lock:
            reads.append(url)
            if len(reads) == number:
                call()
        return original(self, url, part)

    patch.setattr(FileReader, "get", get)
    return reads


def test_a_checkpoint_removed_while_it_is_read_is_followed_by_the_newer_one(
    server: Server, store: JobStore, trained: Trained, versions: dict[int, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    written, older = complete(trained.second.checkpoints)[SECOND], store.weights(FIRST)
    newer = store.checkpoints / written.name
    shutil.copytree(written, newer)
    marker = (newer / MARKER).rename(newer / "later")

    def replace() -> None:
        marker.rename(newer / MARKER)
        prune(store.checkpoints, 1, store.attempt)

    agent = store.agent(server, bucket_bytes=1 << 16)  # many reads
    with monkeypatch.context() as patch:
        reads = during_read(patch, 10, replace)
        error = failure(agent)
    assert len(reads) >= 10 and f"No such file or directory: '{older}" in error
    store.begin_attempt()
    assert_filled(agent, server, SECOND, versions)


def test_a_sync_of_a_newer_version_ends_the_reading(
    server: Server, store: JobStore, trained: Trained, versions: dict[int, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    agent, answers = store.agent(server), list[dict[str, Any]]()
    sources = serve(trained.memory[1])

    def sync() -> None:
        answers.append(agent.sync(JOB, SECOND, sources, attempt=3))

    caller = threading.Thread(target=sync)

    def call() -> None:
        caller.start()
        while not agent._calls.other_than(FIRST):
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        reads = during_read(patch, 4, call)
        with pytest.raises(UpdateError, match="a call of the job needs the engine"):
            watch_until(agent, "SERVING", server, 60)
        caller.join(60)
    assert len(reads) >= 4
    assert (answers[0]["state"], answers[0]["weightVersion"]) == ("SERVING", SECOND)
    assert server.control().checksum() == versions[SECOND][1]


@pytest.mark.slow  # starts another engine
def test_each_rank_of_an_engine_gets_what_it_keeps(store: JobStore, trained: Trained, tmp_path: Path) -> None:
    engine = Server(tmp_path, port=free_port(), tensor_parallel=2, return_routed_experts=False)
    try:
        engine.await_answer()
        agent = trained.first.agent(engine, ranks=2)
        watch_until(agent, "STALE", engine, 60)
        sources = serve(trained.memory[0])
        wanted = agent.sync(JOB, FIRST, sources, attempt=1)
        weights = engine.control().checksum()
        assert agent.sync(JOB, FIRST + 1, sources, attempt=1)["checksum"] != wanted["checksum"]
        late = store.agent(engine, ranks=2)
        watch_until(late, "SERVING", engine, 60)
        status = late.status()
        assert (status["weightVersion"], status["checksum"]) == (FIRST, wanted["checksum"])
        assert engine.control().checksum() == weights
        assert len(late._installer.load_report["sent"]) == 2
    finally:
        engine.kill()
