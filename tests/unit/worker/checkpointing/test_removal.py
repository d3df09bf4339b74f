"""The process that removes the folder of a deleted job from a store of files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing import removal
from grpo_worker.checkpointing.fork import _link
from support.objects import job

NAME = "default-tiny-moe-12345678"
NEIGHBOURS = ("default-tiny-moe-12345679", "default-tiny-moe-12345678x", "volumes", "other-tiny-moe-12345678")
# Kills its own process in the place of a removal; the first argument says which one.
KILLED = """
import os, signal, sys
from grpo_worker.checkpointing.removal import main
left, unlink = int(sys.argv.pop(1)), os.unlink

def unlink_or_die(*given, **named):
    global left
    left -= 1
    os.kill(os.getpid(), signal.SIGKILL) if left < 0 else unlink(*given, **named)

os.unlink = unlink_or_die
main(sys.argv[1:])
"""


def _fill(folder: Path) -> Path:
    place = folder / "checkpoints" / "step-00000010.attempt-1"
    (place / "weights").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", "COMMITTED", "weights/0", "weights/1"):
        (place / name).write_text(f"{folder.name} {name}")
    (folder / "run.json").write_text("{}")
    return place


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name in (NAME, *NEIGHBOURS):
        _fill(tmp_path / "store" / name)
    return tmp_path / "store"


def _run(store: Path, name: str = NAME, *program: str) -> subprocess.CompletedProcess[str]:
    start = program or ("-m", "grpo_worker.checkpointing.removal")
    command = [sys.executable, *start, str(store / name), json.dumps({"pvc": "checkpoints"})]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _left(store: Path) -> set[str]:
    return {found.name for found in store.iterdir()}


def _files(store: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(store))


def test_the_folder_of_the_job_is_removed_and_nothing_else(store: Path) -> None:
    before = _files(store) // len(_left(store))
    done = _run(store)
    assert done.returncode == 0, done.stderr
    assert _left(store) == set(NEIGHBOURS) and _files(store) == before * len(NEIGHBOURS)
    assert _run(store).returncode == 0, "nothing is left to do"
    assert _left(store) == set(NEIGHBOURS)


def test_the_operator_names_the_folder_as_the_job_does() -> None:
    manifest = job()
    folder = names.job_store("default", names.writer(manifest))
    assert folder == f"/store/{NAME}" and removal._NAME.fullmatch(Path(folder).name)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_run_that_is_killed_leaves_no_checkpoint_and_the_next_one_finishes(store: Path, after: int) -> None:
    killed = _run(store, NAME, "-c", KILLED, str(after))
    assert killed.returncode == -9
    assert NAME not in _left(store), "nobody takes a part of it for a checkpoint"
    (remains,) = _left(store) - set(NEIGHBOURS)
    assert _files(store / remains) == 6 - after
    assert _run(store).returncode == 0 and _left(store) == set(NEIGHBOURS)


def test_what_a_late_pod_has_written_since_is_removed_too(store: Path) -> None:
    assert _run(store, NAME, "-c", KILLED, "2").returncode == -9
    _fill(store / NAME)
    assert _run(store).returncode == 0 and _left(store) == set(NEIGHBOURS)


def test_symbolic_links_are_removed_and_not_followed(store: Path, tmp_path: Path) -> None:
    outside = _fill(tmp_path / "outside")
    inside = store / NAME / "checkpoints"
    (inside / "step-00000020").symlink_to(outside)
    (inside / "__0_0.distcp").symlink_to(outside / "__0_0.distcp")
    (inside / "neighbour").symlink_to(Path("..", "..", NEIGHBOURS[0]))
    (inside / "loop").symlink_to(inside)
    assert _run(store).returncode == 0 and _left(store) == set(NEIGHBOURS)
    assert _files(tmp_path / "outside") == 6 and _files(store / NEIGHBOURS[0]) == 6


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_refused(store: Path, kind: str) -> None:
    name = "default-tiny-moe-aaaaaaaa"
    (store / name).symlink_to(NEIGHBOURS[0]) if kind == "link" else (store / name).write_text("x")
    done = _run(store, name)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"checkpoint.store.pvc=checkpoints: {name} is not removed: ValueError: {name} is a symbolic link or "
        "a file, not the job's folder: remove it yourself"
    )
    assert name in _left(store) and _files(store / NEIGHBOURS[0]) == 6


@pytest.mark.parametrize("name", ["volumes", "", "..", ".deleted-x-12345678", "a-1234567", "a b-12345678"])
def test_what_is_no_name_of_a_job_is_refused(store: Path, name: str) -> None:
    before = _files(store.parent)
    with pytest.raises(ValueError, match="is not the name of a job's folder"):
        removal.remove(StoreSpec(pvc="checkpoints"), Path(f"{store}/{name}"))
    assert _files(store.parent) == before


def test_a_store_that_refuses_is_named_with_the_cause(store: Path) -> None:
    done = _run(store / "absent")
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"checkpoint.store.pvc=checkpoints: {NAME} is not removed: FileNotFoundError"
    )


def test_a_fork_keeps_its_files(store: Path) -> None:
    source = store / NAME / "checkpoints" / "step-00000010.attempt-1"
    copy = store / NEIGHBOURS[0] / "of-the-source"
    _link(source / "__0_0.distcp", copy)
    assert _run(store).returncode == 0
    assert copy.read_text() == f"{NAME} __0_0.distcp"


def test_of_objects_the_markers_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is fsspec's in memory; tests/worker/test_bucket_removal.py has a real server."""
    root = UPath(f"memory:/{tmp_path}")
    for name in (NAME, NEIGHBOURS[1]):
        for file in ("a/__0_0.distcp", "a/COMMITTED", "b/COMMITTED", "run.json"):
            (root / name / "checkpoints" / file).write_text("{}")
    remove, requests = root.fs.rm, list[Any]()

    def noted(path: Any, **named: Any) -> None:
        requests.append(path)
        remove(path, **named)

    monkeypatch.setattr(root.fs, "rm", noted)
    removal._remove_objects(root / NAME)
    markers, rest = requests
    assert [Path(name).parts[-2:] for name in markers] == [("a", "COMMITTED"), ("b", "COMMITTED")]
    assert rest == (root / NAME).path
    assert root.fs.find((root / NAME).path) == []
    assert len(root.fs.find((root / NEIGHBOURS[1]).path)) == 4
