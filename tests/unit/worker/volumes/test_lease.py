"""Jobs that need the same files: one fetches, the others wait for it."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_operator.api.v1alpha1.volumes import COMPLETE
from grpo_worker.volumes import fetched_volume
from grpo_worker.volumes import lease as fetch_lease
from grpo_worker.volumes.lease import FetchLease, Holder
from grpo_worker.volumes.remote.errors import PermanentFetchError
from support.fetching import FIELD, FILES, LARGE, contents, fetching, until, volume
from support.stand_in_hub import StandInHub

LEASE = "LEASE"


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with StandInHub(dict(FILES), large=LARGE) as server:
        yield server


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_volume, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(fetch_lease, "HEARTBEAT_SECONDS", 0.02)


class Job(threading.Thread):
    """Fetches in a thread."""

    def __init__(
        self,
        hub: StandInHub,
        directory: Path,
        writer: str,
        token: str | None = None,
        pod: str = "pod",
        pause: float = 0.01,
    ) -> None:
        super().__init__(daemon=True)
        self.reports: list[str] = []
        self.failure: BaseException | None = None
        self._fetching = fetching(volume(hub), directory, token, writer, pod)
        self._pause = pause
        self.start()

    def run(self) -> None:
        try:
            self._fetching.fetch(self.reports.append, self._pause)
        except BaseException as error:  # noqa: BLE001 - kept for the test
            self.failure = error


def write_lease(directory: Path, writer: str, pod: str, age: float = 0.0) -> Path:
    """Write the lease of a pod that died ``age`` seconds ago."""
    directory.mkdir(exist_ok=True)
    path = directory / LEASE
    path.write_text(json.dumps({"writer": writer, "pod": pod, "progress": "fetching"}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_concurrent_jobs_fetch_a_volume_once(hub: StandInHub, tmp_path: Path) -> None:
    hub.pause, hub.cut = 0.01, [8192, 16384, 4096]
    jobs = [Job(hub, tmp_path, f"job-{n}") for n in range(4)]
    for job in jobs:
        job.join()
    assert not any(job.failure for job in jobs) and contents(tmp_path) == FILES
    assert {p.name for p in tmp_path.iterdir()} == {"files", COMPLETE, "REVISION"}
    assert len([asked for asked in hub.reads("model.safetensors") if asked is None]) == 1
    waiting = [text for job in jobs for text in job.reports if "another job fetches it" in text]
    assert any(text.startswith(f"{FIELD}: another job fetches it: job-") for text in waiting)
    assert any(text.endswith(" of 90.0 kB") for text in waiting), waiting


def test_the_lease_of_a_dead_job_is_taken_over(hub: StandInHub, tmp_path: Path) -> None:
    lease = write_lease(tmp_path, "dead", "pod", age=50)
    job = Job(hub, tmp_path, "job-0")
    until(lambda: f"{FIELD}: another job fetches it: dead: fetching" in job.reports)
    assert not hub.requests, "its heartbeat is not old enough"
    os.utime(lease, (time.time() - 61, time.time() - 61))
    job.join()
    assert not job.failure and contents(tmp_path) == FILES and not lease.exists()


def test_a_partly_written_lease_expires_too(hub: StandInHub, tmp_path: Path) -> None:
    lease = write_lease(tmp_path, "", "", age=61)
    lease.write_text("")
    os.utime(lease, (time.time() - 61, time.time() - 61))
    job = Job(hub, tmp_path, "job-0")
    job.join()
    assert not job.failure and contents(tmp_path) == FILES


def test_a_restarted_container_keeps_its_lease(hub: StandInHub, tmp_path: Path) -> None:
    write_lease(tmp_path, "job-0", "pod")
    job = Job(hub, tmp_path, "job-0")
    job.join()
    assert not job.failure and not any("fetches it" in text for text in job.reports)


def test_a_pod_that_replaces_another_continues_its_partial_files(hub: StandInHub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": FILES["model.safetensors"]}
    hub.cut = [4096]

    def die(report: str) -> None:
        if "interrupted" in report:
            raise SystemExit

    with pytest.raises(SystemExit):
        fetching(volume(hub), tmp_path, pod="first").fetch(die)
    lease = write_lease(tmp_path, "job-0", "first")
    second = Job(hub, tmp_path, "job-0", pod="second")
    until(lambda: f"{FIELD}: another pod of this job fetches it: job-0: fetching" in second.reports)
    lease.unlink()
    second.join()
    assert not second.failure and contents(tmp_path) == hub.files
    assert hub.reads("model.safetensors") == [None, "bytes=4096-"]


def test_a_fetch_that_loses_its_lease_stops(hub: StandInHub, tmp_path: Path) -> None:
    hub.pause = 0.5
    job = Job(hub, tmp_path, "job-0")
    until(lambda: hub.reads("model.safetensors"))
    lease = write_lease(tmp_path, "other", "pod")
    until(lambda: any("interrupted: another job has taken over" in text for text in job.reports))
    assert job.is_alive() and not (tmp_path / "files" / "model.safetensors").exists()
    assert json.loads(lease.read_text())["writer"] == "other"
    hub.pause = 0.0
    lease.unlink()
    job.join()
    assert not job.failure and contents(tmp_path) == FILES


def test_a_job_without_progress_releases_the_lease(hub: StandInHub, tmp_path: Path) -> None:
    """Its pod may lack a proxy or a credential that the other pod has."""
    hub.token = "t"
    refused = Job(hub, tmp_path, "without")
    refused.join()
    assert isinstance(refused.failure, PermanentFetchError) and not (tmp_path / LEASE).exists()
    hub.failures = [503] * 3
    slow = Job(hub, tmp_path, "slow", "t", pause=30.0)
    until(lambda: any("next try in 30 s" in text for text in slow.reports))
    other = Job(hub, tmp_path, "other", "t")
    other.join()
    assert not other.failure and contents(tmp_path) == FILES


def test_partial_files_of_others_are_deleted_for_space(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "partial" / "gone" / "0123"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"0")
    usage = shutil.disk_usage(tmp_path)
    free = {True: 10, False: 10**9}
    monkeypatch.setattr(
        "grpo_worker.volumes.fetched_volume.shutil.disk_usage",
        lambda _: usage._replace(free=free[left.exists()]),
    )
    fetching(volume(hub), tmp_path).fetch(lambda _: None, 0.01)
    assert contents(tmp_path) == FILES


def test_a_heartbeat_renews_the_lease(tmp_path: Path) -> None:
    lease = FetchLease(tmp_path, "job-0", "pod-0")
    assert lease.acquire() and lease.acquire()
    first = (tmp_path / LEASE).stat().st_mtime_ns
    until(lambda: (tmp_path / LEASE).stat().st_mtime_ns > first)
    lease.progress = "half"
    until(lambda: (lease.holder() or Holder("", "")).progress == "half")
    assert not FetchLease(tmp_path, "job-1", "pod-1").acquire()
    lease.release()
    assert list(tmp_path.iterdir()) == [] and FetchLease(tmp_path, "job-1", "pod-1").acquire()
