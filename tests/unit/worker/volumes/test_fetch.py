"""Fetching a volume by URI: a whole directory or a named reason, whatever the network does."""

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
from grpo_worker.volumes import fetched_volume
from grpo_worker.volumes.remote.errors import PermanentFetchError
from support.fetching import FIELD, FILES, LARGE, contents, fetch, fetching, until, volume
from support.stand_in_hub import StandInHub


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
    thread = threading.Thread(target=fetching(spec, tmp_path).fetch, args=(said.append, 0.01), daemon=True)
    thread.start()
    until(lambda: len(said) >= 3)
    assert said[0].startswith(f"fetching {FIELD}; interrupted: ") and "check" not in said[1]
    assert f"; check {FIELD}.endpoint and the proxy, DNS and certificates of the controller's pod" in said[2]
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
    good, hub.cut = FILES["model.safetensors"], [4096]
    done = threading.Event()

    def damage(said: str) -> None:
        if "interrupted" in said and not done.is_set():
            done.set()
            (partial,) = [p for p in (tmp_path / "partial" / "job-0").iterdir() if p.stat().st_size == 4096]
            partial.write_bytes(b"x" * 4096)

    hub.files = {"model.safetensors": good}
    fetching(volume(hub), tmp_path).fetch(damage, 0.01)
    assert done.is_set() and contents(tmp_path) == {"model.safetensors": good}
    assert hub.reads("model.safetensors") == [None, "bytes=4096-", None]


def test_a_token_is_sent_and_its_lack_named(hub: StandInHub, tmp_path: Path) -> None:
    hub.token = "secret"
    uri = r"spec\.model\.volume\.uri=hf://org/model"
    with pytest.raises(PermanentFetchError, match=uri + ": 401: it needs a credential.*: set credential"):
        fetch(volume(hub), tmp_path)
    with pytest.raises(PermanentFetchError, match=uri + ": 401: the credential does not give access"):
        fetch(volume(hub), tmp_path, "wrong")
    fetch(volume(hub), tmp_path, "secret")
    assert contents(tmp_path) == FILES
    assert not any(b"secret" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_what_is_not_there_is_named(hub: StandInHub, tmp_path: Path) -> None:
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
    monkeypatch.setattr(fetched_volume.shutil, "disk_usage", lambda _: usage)
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


def test_a_page_instead_of_an_answer_passes(hub: StandInHub, tmp_path: Path) -> None:
    """A proxy sends its own now and then, with status 200."""
    hub.failures = [200]
    said = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
    assert any("interrupted: the answer is no JSON" in text for text in said)


def test_storage_that_fails_is_waited_for(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = shutil.disk_usage, [OSError(errno.ESTALE, "Stale file handle")]

    def fail_once(*given: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*given, **more)

    monkeypatch.setattr(fetched_volume.shutil, "disk_usage", fail_once)
    said = fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
    assert any("interrupted: job's store: [Errno 116] Stale file handle" in text for text in said)


def test_what_is_in_the_way_in_the_store_is_named(hub: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "files" / "config.json" / "deep").mkdir(parents=True)
    with pytest.raises(
        PermanentFetchError, match=rf"^{FIELD}\.uri=.*is in the way: .*config\.json'?: remove it"
    ):
        fetch(volume(hub), tmp_path)


def test_a_file_that_the_source_has_replaced_by_a_directory_gives_way(
    hub: StandInHub, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer").touch()
    fetch(volume(hub), tmp_path)
    assert contents(tmp_path) == FILES
