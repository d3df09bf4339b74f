"""Fetching a volume by URI: a complete directory or a named error, whatever the network does."""

import errno
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.volumes import COMPLETE, VolumeSpec
from grpo_worker.volumes.remote.errors import PermanentFetchError
from support.fetching import FIELD, FILES, LARGE, contents, fetch, fetching, until, volume
from support.stand_in_hub import StandInHub


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with StandInHub(dict(FILES), large=LARGE) as server:
        yield server


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_a_repository_is_fetched_completely_and_only_once(kind: str, tmp_path: Path) -> None:
    with StandInHub(dict(FILES), kind=kind, large=LARGE) as hub:
        prefix = "datasets/" if kind == "datasets" else ""
        spec = volume(hub, uri=f"hf://{prefix}org/model@main")
        fetch(spec, tmp_path)
        assert contents(tmp_path) == FILES
        assert json.loads((tmp_path / COMPLETE).read_text())["bytes"] == sum(map(len, FILES.values()))
        assert not (tmp_path / "partial").exists()
        calls = len(hub.requests)
        fetch(spec, tmp_path)
        assert len(hub.requests) == calls, "what is complete is not asked for again"


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_resumes_at_its_offset(ranges: bool, hub: StandInHub, tmp_path: Path) -> None:
    hub.ranges = ranges
    hub.files = {"model.safetensors": FILES["model.safetensors"]}
    hub.cut = [40960, 20480 if ranges else 61440]
    reports = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == hub.files
    assert hub.reads("model.safetensors") == [None, "bytes=40960-", "bytes=61440-"]
    assert any("interrupted: model.safetensors: " in text and "next try in" in text for text in reports)


def test_transient_http_statuses_are_retried(hub: StandInHub, tmp_path: Path) -> None:
    hub.failures = [503, 429]
    reports = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
    assert any("status 503" in text for text in reports)


def test_an_unreachable_mirror_is_retried_and_named(tmp_path: Path) -> None:
    reports: list[str] = []
    spec = VolumeSpec(mount_path="/models", uri="hf://org/model", endpoint="http://127.0.0.1:9")
    thread = threading.Thread(target=fetching(spec, tmp_path).fetch, args=(reports.append, 0.01), daemon=True)
    thread.start()
    until(lambda: len(reports) >= 3)
    assert reports[0].startswith(f"fetching {FIELD}; interrupted: ") and "check" not in reports[1]
    remedy = f"; check {FIELD}.endpoint and the proxy, DNS and certificates of the controller's pod"
    assert remedy in reports[2]
    (tmp_path / COMPLETE).touch()  # another job has fetched it meanwhile, which ends the thread


def test_a_restart_keeps_the_files_that_are_whole(hub: StandInHub, tmp_path: Path) -> None:
    fetch(volume(hub), tmp_path)
    (tmp_path / COMPLETE).unlink()
    (tmp_path / "files" / "config.json").unlink()
    (tmp_path / "files" / "from-an-earlier-listing").touch()
    hub.requests.clear()
    fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
    assert hub.reads("config.json") == [None] and hub.reads("model.safetensors") == []


def test_content_with_another_digest_is_fetched_again(hub: StandInHub, tmp_path: Path) -> None:
    good, hub.cut = FILES["model.safetensors"], [4096]
    done = threading.Event()

    def damage(report: str) -> None:
        if "interrupted" in report and not done.is_set():
            done.set()
            (partial,) = [p for p in (tmp_path / "partial" / "job-0").iterdir() if p.stat().st_size == 4096]
            partial.write_bytes(b"x" * 4096)

    hub.files = {"model.safetensors": good}
    fetching(volume(hub), tmp_path).fetch(damage, 0.01)
    assert done.is_set() and contents(tmp_path) == {"model.safetensors": good}
    assert hub.reads("model.safetensors") == [None, "bytes=4096-", None]


def test_the_token_is_sent_and_a_missing_one_is_named(hub: StandInHub, tmp_path: Path) -> None:
    hub.token = "secret"
    uri = r"spec\.model\.volume\.uri=hf://org/model"
    with pytest.raises(PermanentFetchError, match=uri + ": 401: it needs a credential.*: set credential"):
        fetch(volume(hub), tmp_path)
    with pytest.raises(PermanentFetchError, match=uri + ": 401: the credential does not give access"):
        fetch(volume(hub), tmp_path, "wrong")
    fetch(volume(hub), tmp_path, "secret")
    assert contents(tmp_path) == FILES
    assert not any(b"secret" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_a_missing_repository_or_revision_is_named(hub: StandInHub, tmp_path: Path) -> None:
    with pytest.raises(
        PermanentFetchError, match=r"hf://org/other: there is no such file or directory: correct uri"
    ):
        fetch(volume(hub, uri="hf://org/other"), tmp_path)
    with pytest.raises(PermanentFetchError, match=r"write hf://ORG/NAME"):
        fetch(volume(hub, uri="hf://model"), tmp_path)


def test_the_digest_is_that_of_sha256sum(hub: StandInHub, tmp_path: Path) -> None:
    wrong = "sha256:" + "0" * 64
    named = rf"^spec\.model\.volume\.digest={wrong}: the files of"
    with pytest.raises(PermanentFetchError, match=named) as caught:
        fetch(volume(hub, digest=wrong), tmp_path / "wrong")
    assert not (tmp_path / "wrong" / COMPLETE).exists()
    for name, content in FILES.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_bytes(content)
    command = "find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    printed = subprocess.run(
        command, shell=True, cwd=tmp_path / "own", capture_output=True, check=True
    ).stdout
    right = "sha256:" + printed.decode().split()[0]
    assert f"have {right}: correct digest" in str(caught.value)
    fetch(volume(hub, digest=right), tmp_path / "right")
    assert contents(tmp_path / "right") == FILES


def test_a_store_without_room_is_named(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr("grpo_worker.volumes.fetched_volume.shutil.disk_usage", lambda _: usage)
    with pytest.raises(
        PermanentFetchError, match=r"90\.0 kB are to be fetched and the job's store has 50\.0 kB free"
    ):
        fetch(volume(hub), tmp_path)
    assert hub.reads("model.safetensors") == []


def test_a_name_outside_of_the_directory_is_refused(hub: StandInHub, tmp_path: Path) -> None:
    hub.files = {"../stolen": b"x"}
    with pytest.raises(PermanentFetchError, match="outside of its directory"):
        fetch(volume(hub), tmp_path / "volume")
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize("names", [["a.txt", "a.txt"], [""]])
def test_names_that_cannot_be_files_are_refused(names: list[str], hub: StandInHub, tmp_path: Path) -> None:
    entries = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
    hub.files, hub.entries = {"a.txt": b"x"}, entries
    with pytest.raises(PermanentFetchError, match=rf"it names {len(names)} files '.*': correct uri"):
        fetch(volume(hub), tmp_path)


def test_an_html_page_instead_of_json_is_retried(hub: StandInHub, tmp_path: Path) -> None:
    """A proxy may send a page of its own with status 200."""
    hub.failures = [200]
    reports = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
    assert any("interrupted: the response is not JSON" in text for text in reports)


def test_failing_storage_is_retried(hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = shutil.disk_usage, [OSError(errno.ESTALE, "Stale file handle")]

    def fail_once(*given: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*given, **more)

    monkeypatch.setattr("grpo_worker.volumes.fetched_volume.shutil.disk_usage", fail_once)
    reports = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
    assert any("interrupted: job's store: [Errno 116] Stale file handle" in text for text in reports)


def test_a_directory_in_place_of_a_file_is_named(hub: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "files" / "config.json" / "deep").mkdir(parents=True)
    with pytest.raises(
        PermanentFetchError, match=rf"^{FIELD}\.uri=.*is in the way: .*config\.json'?: remove it"
    ):
        fetch(volume(hub), tmp_path)


def test_a_file_that_became_a_directory_is_replaced(hub: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer").touch()
    fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
