"""Errors of S3's client as those of other file systems."""

import errno

import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError

from grpo_worker.common.s3 import _as_os_errors
from grpo_worker.common.store_problems import answers_not


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
