"""Two gangs of a job on one store: one is cut off from the cluster, and neither knows of the other."""

import multiprocessing
import os
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from grpo_worker.checkpointing import store
from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.checkpointing.store import MARKER, Origin, commit, complete, directory, newest_sound, prune
from grpo_worker.controller.recovery.run_record import RunRecord

FILES = [f"__{rank}_0.distcp" for rank in range(3)] + ["controller.json"]
SIZE = 1 << 18
SPAWN = multiprocessing.get_context("spawn")


class Gang:
    """Controller and ranks of one attempt. Its files have the number of the attempt in every byte."""

    def __init__(self, folder: Path, start: int = 0) -> None:
        """``start``: the step from which it starts."""
        self.root = folder / "checkpoints"
        self.record = RunRecord.load(folder / "run.json")
        self.record.begin_attempt()
        self.record.note_restored(start)

    @property
    def origin(self) -> Origin:
        return Origin("model", "TP1", self.record.attempt)

    def path(self, step: int) -> Path:
        return directory(self.root, step, self.record.attempt)

    def write(self, step: int) -> None:
        self.path(step).mkdir(parents=True)
        for name in FILES:
            (self.path(step) / name).write_bytes(bytes([self.record.attempt]) * SIZE)

    def commit(self, step: int) -> None:
        commit(self.root, step, self.origin)

    def prune(self, keep: int = 2) -> None:
        prune(self.root, keep, self.record.attempt)

    def save(self, step: int) -> None:
        self.write(step)
        self.commit(step)
        self.prune()


def _write_on(folder: Path, writes: Event, stop: Event) -> None:
    """Write all files of a checkpoint again and again, by path and through handles that are open already."""
    handles = [(folder / name).open("r+b") for name in FILES]
    while not stop.is_set():
        for name, handle in zip(FILES, handles, strict=True):
            handle.seek(0)
            handle.write(os.urandom(SIZE))
            handle.flush()
            with suppress(FileNotFoundError):  # the new gang removes it
                folder.mkdir(exist_ok=True)  # a rank 0 that begins to save again
                (folder / name).write_bytes(os.urandom(SIZE))
        writes.set()


def test_ranks_that_go_on_writing_change_nothing_in_what_the_new_gang_saves(tmp_path: Path) -> None:
    old = Gang(tmp_path)
    old.save(9)
    old.write(10)
    writes, stop = SPAWN.Event(), SPAWN.Event()
    zombie = SPAWN.Process(target=_write_on, args=(old.path(10), writes, stop))
    zombie.start()
    try:
        assert writes.wait(60)
        new = Gang(tmp_path, start=9)
        new.save(10)
        for _ in range(3):
            writes.clear()
            assert writes.wait(60), "it still writes"
        found = newest_sound(new.root, "model")
        assert found == new.path(10)
        assert {(found / name).read_bytes() for name in FILES} == {b"\2" * SIZE}
        assert store.verify(found, "model", contents=True) == new.origin
    finally:
        stop.set()
        zombie.join(60)
    assert zombie.exitcode == 0
    new.save(11)
    assert sorted(new.root.iterdir()) == [new.path(10), new.path(11)], "nothing is left of the old gang"


def test_a_gang_that_was_superseded_can_neither_commit_nor_prune(tmp_path: Path) -> None:
    old = Gang(tmp_path)
    for step in (1, 2):
        old.save(step)
    old.write(3)
    new = Gang(tmp_path, start=2)
    new.write(3)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SupersededError, match="attempt 2 has begun in another controller; this one is"):
        old.commit(3)
    with pytest.raises(SupersededError):
        old.prune(keep=1)
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [
        old.path(3) / f".{MARKER}"
    ]
    assert list(complete(new.root)) == [1, 2]
    new.commit(3)
    new.prune()
    assert list(complete(new.root).values()) == [old.path(2), new.path(3)]
    assert sorted(new.root.iterdir()) == [old.path(2), new.path(3)]


def test_what_is_committed_at_the_moment_of_the_handover_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old gang has just found that no newer attempt has begun when one does, and starts from step 2."""
    old = Gang(tmp_path)
    old.save(2)
    old.write(3)
    rename, news = Path.rename, list[Gang]()

    def rename_later(path: Path, target: Path) -> Path:
        if path.name == f".{MARKER}" and not news:
            news.append(Gang(tmp_path, start=2))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_later)
        old.commit(3)
    assert (old.path(3) / MARKER).is_file()
    assert newest_sound(old.root, "model") == old.path(2), "its steps after 2 are not in the ledger any more"
    third = Gang(tmp_path, start=2)
    assert newest_sound(old.root, "model") == old.path(2)
    third.save(3)
    assert complete(old.root) == {2: old.path(2), 3: third.path(3)}
    assert not old.path(3).exists()


def test_a_new_checkpoint_gets_the_room_of_those_that_were_not_completed(tmp_path: Path) -> None:
    old = Gang(tmp_path)
    for step in (1, 2, 3):
        old.save(step)
    old.write(4)
    store.set_aside(old.path(3), store.DamagedCheckpointError("a bit is wrong"))
    new = Gang(tmp_path, start=2)
    new.write(3)
    store.remove_remains(old.root, old.record.attempt)  # by a rank of the old gang
    assert old.path(4).is_dir() and new.path(3).is_dir()
    store.remove_remains(new.root, new.record.attempt)
    assert sorted(new.root.iterdir()) == [old.path(2), old.path(3), new.path(3)]


def test_checkpoints_of_earlier_versions_are_found_and_removed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (4, 8):
        directory(root, step).mkdir(parents=True)
        commit(root, step, Origin("model", "TP1"))
    assert [path.name for path in root.iterdir() if newest_sound(root, "model") == path] == ["step-00000008"]
    gang = Gang(tmp_path, start=8)
    assert list(complete(root).values()) == [root / "step-00000004", root / "step-00000008"]
    gang.save(12)
    assert sorted(root.iterdir()) == [root / "step-00000008", gang.path(12)]
