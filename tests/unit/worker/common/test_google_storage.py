"""Errors of Google Cloud Storage's client as those of other file systems."""

import errno
import json
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ServerDisconnectedError, ServerTimeoutError
from gcsfs.retry import validate_response
from requests.exceptions import ConnectTimeout

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.google_storage import GoogleStorage, _as_os_errors, options
from grpo_worker.common.store_path import store_path
from grpo_worker.common.store_problems import answers_not

STORE = StoreSpec(uri="gs://runs/jobs", endpoint="http://127.0.0.1:1", secret="key")


@pytest.mark.parametrize(
    ("status", "message", "number"),
    [
        (503, "backendError", errno.EIO),
        (500, "internalError", errno.EIO),
        (502, None, errno.EIO),
        (429, "rateLimitExceeded", errno.EIO),
        (408, "took too long", errno.EIO),
        (410, "the upload has ended", errno.EIO),
        (401, "Invalid Credentials", errno.EACCES),
        (403, "does not have storage.objects.create access", errno.EACCES),
        (400, "unknown", errno.EINVAL),
        (400, "invalid argument", errno.EINVAL),
    ],
)
def test_an_answer_has_the_number_of_its_kind(status: int, message: str | None, number: int) -> None:
    answer = json.dumps({"error": {"code": status, "message": message}}).encode()
    with pytest.raises(OSError, match=message) as found, _as_os_errors():
        validate_response(status, answer, "b/runs/o/x")
    assert found.value.errno == number
    assert answers_not(found.value) == (number == errno.EIO)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, FileNotFoundError), (412, FileExistsError)], ids=["missing", "there already"]
)
def test_an_object_that_is_missing_or_there_is_known_by_its_class(status: int, kind: type[OSError]) -> None:
    with pytest.raises(kind), _as_os_errors():
        validate_response(status, b"", "b/runs/o/x")


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (ServerDisconnectedError(), True),
        (ClientConnectionError("refused"), True),
        (ServerTimeoutError("no data"), True),
        (TimeoutError(), True),
        (ConnectTimeout("the token endpoint"), True),
        (AssertionError("Size mismatch"), True),
        (PermissionError(errno.EACCES, "no key"), False),
        (OSError(errno.ENOSPC, "full"), False),
    ],
    ids=lambda value: repr(value),
)
def test_only_a_server_that_does_not_answer_is_asked_again(error: Exception, away: bool) -> None:
    with pytest.raises(OSError) as found, _as_os_errors():  # noqa: PT011 - each has its own number
        raise error
    assert answers_not(found.value) == away


def test_an_upload_that_the_server_has_forgotten_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgotten(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("o?upload_id=1")

    files = GoogleStorage(**options(STORE))
    monkeypatch.setattr(files, "_request", forgotten)
    with pytest.raises(OSError, match="forgotten an upload") as found:
        files.call("POST", "http://127.0.0.1:1/upload/storage/v1/b/runs/o?upload_id=1")
    assert answers_not(found.value)
    with pytest.raises(FileNotFoundError):
        files.call("GET", "b/runs/o/x")


def test_a_path_in_a_bucket_of_google_has_this_driver_and_no_key() -> None:
    path = store_path(STORE, "gs://runs/jobs/a/b")
    assert str(path) == "gs://runs/jobs/a/b"
    assert isinstance(getattr(path, "fs"), GoogleStorage)  # noqa: B009 - a Path has none
    assert "private" not in repr(path) + repr(getattr(path, "storage_options"))  # noqa: B009
