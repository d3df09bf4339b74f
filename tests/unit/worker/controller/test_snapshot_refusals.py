"""Snapshots that are not used: each is refused with its reason, and the next source is taken."""

import json
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_worker.checkpointing.snapshot_seal import Note, Snapshot, SnapshotError, content_digest
from grpo_worker.checkpointing.snapshot_transfer import pull
from grpo_worker.checkpointing.snapshots import check, file_of, mark_written, seal
from grpo_worker.checkpointing.state_file import write_state
from grpo_worker.checkpointing.state_tree import StateError
from grpo_worker.common.auth import FILE
from grpo_worker.controller.recovery.memory_tier import MemoryTier
from support.snapshot_pods import RANKS, Gang, Pod, complete_snapshot, open_tier, until

NAME = "3.1"
OTHER = "its seal is of another key, job, snapshot or rank"


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "key"
    file.write_text("the namespace's")
    monkeypatch.setenv(FILE, str(file))
    return file


def _replace(root: Path, job: str, content: bytes, name: str = NAME, rank: int = 0) -> None:
    """Put content in the place of rank 0's snapshot, as whoever has the key would: sealed."""
    file = file_of(root, name, rank)
    file.write_bytes(content)
    digest = content_digest()
    digest.update(content)
    mark_written(file, digest.hexdigest())
    seal(root, Snapshot(job, name, rank))


def _changed_byte(root: Path, _: str) -> None:
    file = file_of(root, NAME, 0)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _truncated(root: Path, _: str) -> None:
    file = file_of(root, NAME, 0)
    file.write_bytes(file.read_bytes()[:20])


def _anothers(root: Path, _: str, rank: int = 1, name: str = NAME) -> None:
    for suffix in (".safetensors", ".json"):
        source = file_of(root, name, rank).with_suffix(suffix)
        shutil.copy(source, file_of(root, NAME, 0).with_suffix(suffix))


def _another_job(root: Path, job: str) -> None:
    _replace(root, f"not {job}", file_of(root, NAME, 0).read_bytes())


def _without_the_key(root: Path, job: str) -> None:
    """Seal as somebody who has another key."""
    file = file_of(root, NAME, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(FILE)
        _replace(root, job, file.read_bytes())


def _no_note(root: Path, _: str) -> None:
    file_of(root, NAME, 0).with_suffix(".json").write_text("[")


SPOILED: list[tuple[Callable[[Path, str], None], str]] = [
    (_changed_byte, "its bytes have changed since it was sealed"),
    (_truncated, "it has 20 bytes instead of"),
    (_anothers, OTHER),
    (_another_job, OTHER),
    (_without_the_key, OTHER),
    (_no_note, "its note is not readable"),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILED)
def test_a_refused_snapshot_is_replaced_by_the_neighbours_and_then_by_the_store(
    tier: MemoryTier, gang: Gang, pods: list[Pod], caplog: pytest.LogCaptureFixture,
    tmp_path: Path, spoil: Callable[[Path, str], None], reason: str,
) -> None:  # fmt: skip
    complete_snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    which = Snapshot(tmp_path.name, NAME, 0)
    spoil(pods[0].snapshots, tmp_path.name)
    with pytest.raises(SnapshotError, match=reason):
        check(pods[0].snapshots, which)
    assert tier.restore(after=2) is not None and gang.state == expected
    assert f"snapshot {NAME} of rank 0 of this pod is not used: {reason}" in caplog.text
    check(pods[0].snapshots, which)

    caplog.clear()
    for pod in pods:
        spoil(pod.snapshots, tmp_path.name)
    gang.state = [0] * RANKS
    assert open_tier(gang, tmp_path).restore(after=2) is None and gang.state == [0] * RANKS
    assert f"{which} is nowhere to be had" in caplog.text and f"snapshot {NAME} is no longer" in caplog.text


def test_a_snapshot_of_another_step_is_refused(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    complete_snapshot(tier, gang, 2)
    complete_snapshot(tier, gang, 3)
    _anothers(pods[0].snapshots, "", rank=0, name="2.1")
    expected, gang.state = gang.state, [0] * RANKS
    assert tier.restore(after=2) is not None and gang.state == expected


class _Code:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def test_a_pickle_is_not_run_and_the_next_attempt_uses_the_store(
    tier: MemoryTier, gang: Gang, pods: list[Pod], tmp_path: Path
) -> None:
    complete_snapshot(tier, gang, 3)
    _replace(pods[0].snapshots, tmp_path.name, pickle.dumps(_Code(tmp_path / "ran")))
    with pytest.raises(StateError, match=r"rank-0.safetensors is a pickle, which could run code"):
        tier.restore(after=2)
    assert tier.restore(after=2) is None and not (tmp_path / "ran").exists()


@pytest.mark.fault(
    row="key-rotation",
    point="the key changes between a snapshot and its restore",
    witness="nothing is restored",
    partial="not during an update; stand-in ranks",
)
def test_a_changed_key_refuses_the_snapshots_of_the_old_one(
    tier: MemoryTier, gang: Gang, key: Path, tmp_path: Path
) -> None:
    complete_snapshot(tier, gang, 3)
    key.write_text("a new one")
    assert open_tier(gang, tmp_path).restore(after=2) is None


@pytest.mark.parametrize("keyless", [True, False])
def test_holders_that_somebody_without_the_key_names_are_not_asked(
    tier: MemoryTier, gang: Gang, tmp_path: Path, caplog: pytest.LogCaptureFixture, keyless: bool
) -> None:
    """The agents would show them the key."""
    complete_snapshot(tier, gang, 3)
    file = tmp_path / "memory.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(FILE)
        forger = open_tier(gang, tmp_path)
        record = json.loads(file.read_text()) | {"step": 4}
        if keyless:
            forger._write({name: value for name, value in record.items() if name != "seal"})
        else:
            file.write_text(json.dumps(record))
    assert open_tier(gang, tmp_path).restore(after=2) is None
    assert "memory.json is not used: its seal is of another key or job" in caplog.text


def test_without_a_readable_key_nothing_is_sealed_or_used(key: Path, tmp_path: Path) -> None:
    which, file = Snapshot("job", NAME, 0), file_of(tmp_path, NAME, 0)
    file.parent.mkdir()
    mark_written(file, write_state(file, 1))
    seal(tmp_path, which)
    key.unlink()
    for call in (seal, check):
        with pytest.raises(PermissionError, match="cannot be read"):
            call(tmp_path, which)


def test_a_rank_that_has_not_written_its_snapshot_has_none_to_seal(tmp_path: Path) -> None:
    file = file_of(tmp_path, NAME, 0)
    file.parent.mkdir()
    write_state(file, 1)
    with pytest.raises(SnapshotError, match=r"there is no rank-0.written"):
        seal(tmp_path, Snapshot("job", NAME, 0))


class Impostor:
    """A server with the address of a holder that sends the true note, or its own, and bytes without end."""

    def __init__(self, note: str) -> None:
        self.note, self.sent = note, 0
        routes = [
            Route("/v1/snapshots/{name}/{rank:int}.json", lambda _: PlainTextResponse(self.note)),
            Route("/v1/snapshots/{name}/{rank:int}.safetensors", self._endless),
        ]
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = uvicorn.Config(Starlette(routes=routes), port=port, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        threading.Thread(target=self.server.run, daemon=True).start()
        until(lambda: self.server.started)

    def _endless(self, _: Request) -> Response:
        def content() -> Iterator[bytes]:
            while True:
                self.sent += 1 << 20
                yield bytes(1 << 20)

        return StreamingResponse(content())


def test_an_impostor_fills_no_memory_and_the_next_holder_is_asked(pods: list[Pod], tmp_path: Path) -> None:
    which, root = Snapshot("job", NAME, 0), pods[0].snapshots
    file_of(root, NAME, 0).parent.mkdir(parents=True)
    _replace(root, "job", bytes(100))
    true = file_of(root, NAME, 0).with_suffix(".json").read_text()
    forged = Note(1 << 40, "0", "0" * 64).text()
    impostor, to = Impostor(true), tmp_path / "c"
    try:
        for note, reason in (
            (true, "are not those of its digest"),
            (forged, OTHER),
            ("x" * 9000, "more than"),
        ):
            impostor.note = note
            with pytest.raises(SnapshotError, match=reason):
                pull(to, which, [impostor.url], 5)
            assert not list(to.glob("*/*"))
        assert 0 < impostor.sent < 256 << 20
        pull(to, which, [impostor.url, pods[0].url], 5)
        check(to, which)
        assert sorted(file.name for file in to.glob("*/*")) == ["rank-0.json", "rank-0.safetensors"]
    finally:
        impostor.server.should_exit = True
        impostor.server.force_exit = True
