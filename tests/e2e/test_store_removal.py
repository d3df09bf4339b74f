"""The folder of a deleted job is removed by a real pod, on the node's own files."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.paths import JOB_DATA
from support.faults import until
from support.jobs import Start

pytestmark = pytest.mark.slow  # a job of its own
_USER = 65532  # of all pods of jobs


def _checkpoint() -> dict[str, Any]:
    return {"store": {"path": str(JOB_DATA)}, "deletionPolicy": "Delete"}


def _fill(folder: Path) -> Path:
    """Make a folder as a job leaves it, with a link that leads out of it."""
    place = folder / "checkpoints" / "step-00000010.attempt-1"
    place.mkdir(parents=True)
    for name in ("__0_0.distcp", "COMMITTED"):
        (place / name).write_text(name)
    (place / "out").symlink_to(JOB_DATA)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, _USER, _USER, follow_symlinks=False)
    return folder


def _delete(job: JobView) -> None:
    job.kubectl("delete", "grpojob", job.name, "--wait=false")
    left = ("get", "grpojob", job.name, "--ignore-not-found", "-o", "name")
    until("the job is gone", lambda: not job.kubectl(*left).strip(), 120)


def test_the_folder_of_a_deleted_job_is_removed_and_its_neighbour_stays(start: Start) -> None:
    """The job is suspended: the operator needs no pod of its own for that."""
    job = start("leaves", suspend=True, checkpoint=_checkpoint())
    until("held", lambda: job.get()["metadata"].get("finalizers"), 60)
    folder, neighbour = _fill(job.store()), _fill(JOB_DATA / "default-leaves-00000000")
    began = time.monotonic()
    _delete(job)
    print(f"the job was gone after {time.monotonic() - began:.0f} s")
    assert not folder.exists() and not list(JOB_DATA.glob(".deleted-*"))
    assert (neighbour / "checkpoints" / "step-00000010.attempt-1" / "COMMITTED").is_file()
    events = job.kubectl("get", "events", "--field-selector=reason=StoreRemoved")
    assert folder.name in events
    shutil.rmtree(neighbour)
