"""Fetching a volume by URI: a whole directory or a named reason, whatever the network does."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from objects import job
from stand_in_hub import StandInHub

from grpo_operator.api.volumes import VolumeSpec
from grpo_worker.data import fetched_volume
from grpo_worker.data.fetched_volume import COMPLETE, FetchedVolume
from grpo_worker.data.remote.errors import RefusedError
from grpo_worker.data.remote.objects import ObjectSource, object_store

FIELD = "spec.model.volume"
FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer/vocab.txt": b"a\nb\n",
    "model.safetensors": b"0123456789" * 9000,
}
LARGE = frozenset({"model.safetensors"})


def volume(hub: StandInHub, **more: Any) -> VolumeSpec:
    values = {"mountPath": "/models", "uri": "hf://org/model", "endpoint": hub.url} | more
    return VolumeSpec.model_validate(values)


def fetch(
    spec: VolumeSpec, directory: Path, token: str | None = None, me: str = "pod-0", pause: float = 0.01
) -> list[str]:
    """Fetch, and return what was reported."""
    said: list[str] = []
    FetchedVolume(FIELD, spec, directory, token, me).fetch(said.append, pause)
    return said


def contents(directory: Path) -> dict[str, bytes]:
    root = directory / "files"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with StandInHub(dict(FILES), large=LARGE) as server:
        yield server


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_a_repository_is_fetched_whole_once(kind: str, tmp_path: Path) -> None:
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
def test_a_cut_connection_goes_on_where_it_was_cut(ranges: bool, hub: StandInHub, tmp_path: Path) -> None:
    hub.ranges = ranges
    hub.files = {"model.safetensors": FILES["model.safetensors"]}
    hub.cut = [40960, 20480 if ranges else 61440]
    said = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == hub.files
    assert hub.reads("model.safetensors") == [None, "bytes=40960-", "bytes=61440-"]
    assert any("interrupted: model.safetensors: " in text and "next try in" in text for text in said)


def test_statuses_that_pass_are_waited_for(hub: StandInHub, tmp_path: Path) -> None:
    hub.failures = [503, 429]
    said = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
    assert any("status 503" in text for text in said)


def test_an_unreachable_mirror_is_tried_again_and_named(tmp_path: Path) -> None:
    said: list[str] = []
    spec = VolumeSpec(mount_path="/models", uri="hf://org/model", endpoint="http://127.0.0.1:9")
    fetching = FetchedVolume(FIELD, spec, tmp_path, None, "pod")
    threading.Thread(target=fetching.fetch, args=(said.append, 0.01), daemon=True).start()
    _until(lambda: len(said) >= 2)
    assert said[1].startswith(f"fetching {FIELD}; interrupted: ")
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


def test_content_that_is_not_the_hubs_is_fetched_again(hub: StandInHub, tmp_path: Path) -> None:
    fetching = FetchedVolume(FIELD, volume(hub), tmp_path, None, "pod-0")
    good, hub.cut = FILES["model.safetensors"], [4096]
    done = threading.Event()

    def damage(said: str) -> None:
        if "interrupted" in said and not done.is_set():
            done.set()
            (partial,) = [p for p in (tmp_path / "partial" / "pod-0").iterdir() if p.stat().st_size == 4096]
            partial.write_bytes(b"x" * 4096)

    hub.files = {"model.safetensors": good}
    fetching.fetch(damage, 0.01)
    assert done.is_set() and contents(tmp_path) == {"model.safetensors": good}
    assert hub.reads("model.safetensors") == [None, "bytes=4096-", None]


def test_a_token_is_sent_and_its_lack_named(hub: StandInHub, tmp_path: Path) -> None:
    hub.token = "secret"
    uri = r"spec\.model\.volume\.uri=hf://org/model"
    with pytest.raises(RefusedError, match=uri + ": 401: it needs a credential.*: set credential"):
        fetch(volume(hub), tmp_path)
    with pytest.raises(RefusedError, match=uri + ": 401: the credential does not give access"):
        fetch(volume(hub), tmp_path, "wrong")
    fetch(volume(hub), tmp_path, "secret")
    assert contents(tmp_path) == FILES
    assert not any(b"secret" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_what_is_not_there_is_named(hub: StandInHub, tmp_path: Path) -> None:
    with pytest.raises(
        RefusedError, match=r"hf://org/other: there is no such file or directory: correct uri"
    ):
        fetch(volume(hub, uri="hf://org/other"), tmp_path)
    with pytest.raises(RefusedError, match=r"write hf://ORG/NAME"):
        fetch(volume(hub, uri="hf://model"), tmp_path)


def test_the_digest_is_that_of_sha256sum(hub: StandInHub, tmp_path: Path) -> None:
    wrong = "sha256:" + "0" * 64
    with pytest.raises(RefusedError, match=rf"spec\.model\.volume\.digest={wrong}: the files of") as caught:
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
    monkeypatch.setattr(fetched_volume.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        RefusedError, match=r"90\.0 kB are to be fetched and the job's store has 50\.0 kB free"
    ):
        fetch(volume(hub), tmp_path)
    assert hub.reads("model.safetensors") == []


def test_a_name_outside_of_the_directory_is_refused(hub: StandInHub, tmp_path: Path) -> None:
    hub.files = {"../stolen": b"x"}
    with pytest.raises(RefusedError, match="outside of its directory"):
        fetch(volume(hub), tmp_path / "volume")
    assert not (tmp_path / "stolen").exists()


def test_jobs_that_fetch_the_same_at_once_all_get_it(hub: StandInHub, tmp_path: Path) -> None:
    hub.pause, hub.cut = 0.005, [8192, 16384, 4096]
    failures: list[BaseException] = []

    def run(me: str) -> None:
        try:
            fetch(volume(hub), tmp_path, me=me)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(f"pod-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and contents(tmp_path) == FILES
    assert {p.name for p in tmp_path.iterdir()} == {"files", COMPLETE, "REVISION"}


@pytest.mark.parametrize("uri", ["/files/", "/files/model.safetensors"])
def test_a_web_server_gives_a_directory_or_a_file(uri: str, hub: StandInHub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": FILES["model.safetensors"]}
    hub.cut, hub.token = ([], "t") if uri.endswith("/") else ([4096], "t")
    spec = VolumeSpec(mount_path="/models", uri=hub.url + uri)
    fetch(spec, tmp_path, "t")
    wanted = hub.files if uri.endswith("/") else {"model.safetensors": FILES["model.safetensors"]}
    assert contents(tmp_path) == wanted
    with pytest.raises(RefusedError, match="401"):
        fetch(spec, tmp_path / "without")
    with pytest.raises(RefusedError, match="there is no such file"):
        fetch(VolumeSpec(mount_path="/models", uri=hub.url + "/absent" + uri), tmp_path / "absent", "t")


def test_a_driver_that_the_image_lacks_is_named() -> None:
    with pytest.raises(RefusedError, match=r"no driver for az://: add the Python package adlfs"):
        object_store("az://bucket/models")


def test_objects_are_read_from_any_offset(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.bin").write_bytes(b"0123456789")
    source = ObjectSource(fsspec.filesystem("file"), str(tmp_path))
    (found,) = source.files()
    assert (found.path, found.size) == ("deep/b.bin", 10)
    assert b"".join(source.read(found, 4)) == b"456789"
    with pytest.raises(RefusedError, match="there is no such file"):
        ObjectSource(fsspec.filesystem("file"), str(tmp_path / "absent")).files()


def test_the_operator_sees_how_far_it_is_and_what_failed(hub: StandInHub, tmp_path: Path) -> None:
    """The init container's own process, asked at the controller's port."""
    hub.files = {"model.safetensors": b"0" * 1_000_000}
    hub.pause = 0.02
    process = _init_container(hub, tmp_path, {})
    try:
        seen: set[str] = set()
        _until(lambda: _note(seen) and process.poll() is not None)
        assert process.returncode == 0
        shown = sorted(text for text in seen if text.startswith(f"fetching {FIELD}: "))
        assert len(shown) >= 2 and all(text.endswith(" of 1.0 MB") for text in shown)
    finally:
        process.kill()
    hub.token = "secret"
    for environment, phase, message in (
        ({}, "Starting", f"{FIELD}.credential: Secret hub has no key token: kubectl create secret"),
        ({"GRPO_MODEL_CREDENTIAL": "x"}, "Failed", f"{FIELD}.uri=hf://org/model: 401: the credential"),
    ):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        process = _init_container(hub, tmp_path, environment, credential={"secret": "hub"})
        try:
            _until(lambda: (_status() or {}).get("message"))
            status = _status() or {}
            assert (status["phase"], status["engines"]) == (phase, [])
            assert status["message"].startswith(message)
            assert httpx.get("http://127.0.0.1:8090/healthz").text == "ok"
        finally:
            process.kill()
            process.wait()


def _init_container(
    hub: StandInHub, place: Path, environment: dict[str, str], **more: Any
) -> "subprocess.Popen[bytes]":
    given = {"mountPath": "/models", "uri": "hf://org/model", "endpoint": hub.url} | more
    spec = job(model={"path": "/models/a", "volume": given})["spec"]
    config = {
        "name": "j", "namespace": "default", "rolloutService": "r", "minAvailable": 1, "fp8": False,
        "writer": "j-1", "store": "/store/j", "spec": spec,
    }  # fmt: skip
    (place / "job.json").write_text(json.dumps(config))
    env = os.environ | {"GRPO_JOB_FILE": str(place / "job.json"), "POD_NAME": "pod-0"} | environment
    command = [sys.executable, "-m", "grpo_worker.data.fetch", f"model={place / 'store'}"]
    return subprocess.Popen(command, env=env)


def _status() -> dict[str, Any] | None:
    try:
        return dict(httpx.get("http://127.0.0.1:8090/v1/status", timeout=5).json())
    except httpx.TransportError:
        return None


def _note(seen: set[str]) -> bool:
    seen.add((_status() or {}).get("message", ""))
    return True


def _until(done: Any) -> None:
    """Bounded by the test's own time-out."""
    while not done():
        time.sleep(0.05)
