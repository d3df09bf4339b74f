"""Errors of S3's client as those of other file systems."""

import errno

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from s3fs.errors import translate_boto_error

from grpo_worker.common.s3 import _as_os_errors
from grpo_worker.common.store_problems import answers_not


def _answer(status: int, code: str) -> OSError:
    """Return what s3fs makes of a server's answer."""
    answer = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: OSError = translate_boto_error(ClientError(answer, "PutObject"))
    return error


@pytest.mark.parametrize(
    ("status", "code", "number"),
    [
        (503, "SlowDown", errno.EIO),
        (500, "InternalError", errno.EIO),
        (502, "BadGateway", errno.EIO),
        (429, "TooManyRequests", errno.EIO),
        (507, "InsufficientStorage", errno.EDQUOT),
        (400, "QuotaExceeded", errno.EDQUOT),
        (507, "XMinioStorageFull", errno.EDQUOT),
        (400, "UnknownOfThisServer", errno.EINVAL),
    ],
)
def test_an_answer_has_the_number_of_its_kind(status: int, code: str, number: int) -> None:
    with pytest.raises(OSError, match=code) as found, _as_os_errors():
        raise _answer(status, code)
    assert found.value.errno == number


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (OSError(errno.EBUSY, "SlowDown"), True),
        (TimeoutError("RequestTimeout"), True),
        (EndpointConnectionError(endpoint_url="http://s3"), True),
        (NoCredentialsError(), False),
        (PermissionError("Forbidden"), False),
        (FileNotFoundError("NoSuchBucket"), False),
        (OSError(errno.ENOSPC, "full"), False),
    ],
    ids=lambda value: str(value),
)
def test_only_a_server_that_does_not_answer_is_asked_again(error: Exception, away: bool) -> None:
    with pytest.raises(OSError) as found, _as_os_errors():  # noqa: PT011 - each has its own number
        raise error
    assert answers_not(found.value) == away
