"""Access tokens for Google Cloud, from a stand-in for the token endpoint."""

import errno
from collections.abc import Iterator

import pytest
from gcsfs.retry import HttpError, is_retriable
from google.auth.exceptions import RefreshError, TransportError

from grpo_operator.api.names import GOOGLE_KEY_VARIABLE
from grpo_worker.common.google_tokens import AccessTokens, _passes
from support.stand_in_google import StandInGoogle


@pytest.fixture
def google() -> Iterator[StandInGoogle]:
    google = StandInGoogle()
    yield google
    google.stop()


def test_a_key_gives_a_token_that_is_asked_for_once(
    google: StandInGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GOOGLE_KEY_VARIABLE, google.key())
    tokens = AccessTokens(from_secret=True)
    for _ in range(2):
        headers: dict[str, str] = {}
        tokens.apply(headers)
        assert google.accepts({key.title(): value for key, value in headers.items()})
    assert list(google.issued.values()) == ["key"]


def test_a_key_that_is_refused_or_is_none_is_said_at_once(
    google: StandInGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {
        google.key(foreign=True): "invalid_grant",
        "": "key.json is not the JSON key of a service account",
        "[]": "key.json is not the JSON key",
        '{"type": "service_account"}': "key.json is not the JSON key",
    }
    for key, why in refused.items():
        monkeypatch.setenv(GOOGLE_KEY_VARIABLE, key)
        with pytest.raises(PermissionError, match=why) as found:
            AccessTokens(from_secret=True).apply({})
        assert found.value.errno == errno.EACCES
        assert "BEGIN PRIVATE KEY" not in str(found.value)
    assert google.issued == {}


def test_an_endpoint_that_fails_is_asked_again(
    google: StandInGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GOOGLE_KEY_VARIABLE, google.key())
    tokens = AccessTokens(from_secret=True)
    google.stop()
    with pytest.raises(HttpError) as found:
        tokens.apply({})
    assert is_retriable(found.value)


class _Answer:
    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize(
    ("cause", "passes"),
    [
        (TransportError("Compute Engine Metadata server unavailable"), True),
        (TransportError("Status: 500", _Answer(500)), True),
        (TransportError("Status: 404", _Answer(404)), False),
        (None, False),
    ],
    ids=["silent", "failing", "without an identity", "refused"],
)
def test_a_metadata_server_without_an_identity_is_not_asked_again(
    cause: Exception | None, passes: bool
) -> None:
    error = RefreshError("no token")
    error.__cause__ = cause
    assert _passes(error) == passes
