"""Answers of web servers, object stores and their client libraries."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import httpx
import pytest

from grpo_operator.api.v1alpha1.volumes import VolumeSpec
from grpo_worker.volumes.remote.errors import PermanentFetchError, TransientFetchError, translated
from grpo_worker.volumes.remote.objects import ObjectSource, object_store
from grpo_worker.volumes.remote.web import WebSource
from support.fetching import FILES, LARGE, contents, fetch
from support.stand_in_hub import StandInHub


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with StandInHub(dict(FILES), large=LARGE) as server:
        yield server


@pytest.mark.parametrize("uri", ["/files/", "/files/model.safetensors"])
def test_a_web_server_gives_a_directory_or_a_file(uri: str, hub: StandInHub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "sub/a b/c.txt": b"c", "model.safetensors": FILES["model.safetensors"]}
    hub.cut, hub.token = ([], "t") if uri.endswith("/") else ([4096], "t")
    spec = VolumeSpec(mount_path="/models", uri=hub.url + uri)
    fetch(spec, tmp_path, "t")
    wanted = hub.files if uri.endswith("/") else {"model.safetensors": FILES["model.safetensors"]}
    assert contents(tmp_path) == wanted
    with pytest.raises(PermanentFetchError, match="401"):
        fetch(spec, tmp_path / "without")
    with pytest.raises(PermanentFetchError, match="there is no such file"):
        fetch(VolumeSpec(mount_path="/models", uri=hub.url + "/absent" + uri), tmp_path / "absent", "t")


def test_a_failing_subdirectory_fails_the_listing(hub: StandInHub) -> None:
    hub.files = {"a.txt": b"a", "sub/b.txt": b"b"}
    hub.broken = "/files/sub/"
    with pytest.raises(TransientFetchError, match="503"):
        WebSource(hub.url + "/files/", None).files()


def test_a_driver_that_the_image_lacks_is_named() -> None:
    with pytest.raises(PermanentFetchError, match=r"no driver for az://: add the Python package adlfs"):
        object_store("az://bucket/models")


def test_objects_are_read_from_any_offset(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.bin").write_bytes(b"0123456789")
    source = ObjectSource(fsspec.filesystem("file"), str(tmp_path))
    (found,) = source.files()
    assert (found.path, found.size) == ("deep/b.bin", 10)
    assert b"".join(source.read(found, 4)) == b"456789"
    with pytest.raises(PermanentFetchError, match="there is no such file"):
        ObjectSource(fsspec.filesystem("file"), str(tmp_path / "absent")).files()


class NoCredentialsError(Exception):
    """Named as botocore's."""


@pytest.mark.parametrize(
    ("raised", "wanted", "message"),
    [
        (
            json.JSONDecodeError("Expecting value", "<html>", 0),
            TransientFetchError,
            "the response is not JSON",
        ),
        (httpx.ConnectTimeout("slow"), TransientFetchError, "slow"),
        (
            httpx.InvalidURL("Invalid port: 'x'"),
            PermanentFetchError,
            ": correct uri or endpoint",
        ),
        (httpx.UnsupportedProtocol("no scheme"), PermanentFetchError, ": correct uri or endpoint"),
        (NoCredentialsError("Unable to locate credentials"), PermanentFetchError, "controller.podTemplate"),
        (ValueError("bad"), PermanentFetchError, "bad"),
    ],
)
def test_errors_are_permanent_or_transient(raised: Exception, wanted: type[Exception], message: str) -> None:
    with pytest.raises(wanted, match=message), translated(None):
        raise raised
