"""Claims in object stores, what a job may not do there, and whose credentials it has; on real servers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from aiohttp import web

from grpo_operator.api.names import GOOGLE_KEY_VARIABLE
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing import attempts
from grpo_worker.common.clock import SYSTEM_CLOCK
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.recovery.object_store import await_store
from support.google_store import GoogleServer, google_server
from support.object_store import ObjectServer, S3Server, s3_server
from support.store_proxy import faulty

_READ = """
import sys
from pathlib import Path
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.store_path import JobFolder
spec = StoreSpec.model_validate_json(sys.argv[1])
print((JobFolder.of(spec, Path("/store/of-a-pod")).store / "x").read_text())
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleServer]:
    with google_server(tmp_path_factory.mktemp("gs")) as server:
        yield server


@pytest.fixture(params=["s3", "google"])
def server(request: pytest.FixtureRequest) -> ObjectServer:
    found: ObjectServer = request.getfixturevalue(request.param)
    return found


def test_of_many_controllers_one_claims_an_attempt(server: ObjectServer) -> None:
    folder = server.folder("claims")
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda i: attempts.claim(folder, 1, f"controller-{i}"), range(8)))
    assert sum(won) == 1 and attempts.newest(folder) == 1
    assert attempts.owned(folder, 1, f"controller-{won.index(True)}")
    assert attempts.claim(folder, 2, "next") and attempts.newest(folder) == 2


def test_a_claim_whose_answer_was_lost_is_held(server: ObjectServer) -> None:
    """The client sends the request again, and the server says that the claim is there already."""
    lost: list[str] = []

    def choose(request: web.Request, _number: int) -> str | None:
        if request.method in ("PUT", "POST") and not lost:
            lost.append(request.method)
            return "lost"
        return None

    with faulty(server, choose) as proxy:
        folder = JobFolder.of(server.spec(proxy.port), Path("/store/lost")).store
        assert attempts.claim(folder, 1, "controller")
        assert lost and proxy.fired["lost"] == 1
        assert not attempts.claim(folder, 1, "another")


def _refusal(spec: StoreSpec, keys: dict[str, str]) -> str:
    with patch.dict(os.environ, keys), pytest.raises(ValueError, match=r"checkpoint\.store") as refused:
        await_store(JobFolder.of(spec, Path("/store/refused")).store, spec, print, SYSTEM_CLOCK)
    return str(refused.value)


def test_a_bucket_that_is_missing_is_named(server: ObjectServer) -> None:
    await_store(server.folder("fits"), server.spec(), print, SYSTEM_CLOCK)
    assert server.objects("fits") == []
    uri = f"{server.scheme}://other/jobs"
    missing = server.spec().model_copy(update={"uri": uri})
    assert _refusal(missing, server.keys).startswith(f"checkpoint.store.uri={uri}: there is no such bucket (")


def test_a_wrong_key_for_s3_is_refused_with_the_field_and_the_remedy(s3: S3Server) -> None:
    other = s3.spec().model_copy(update={"region": "eu-1"})  # with its own file system, so with its own keys
    wrong = _refusal(other, s3.wrong_keys)
    assert wrong.startswith("checkpoint.store.secret=keys: its credentials give no access to s3://runs/jobs:")


def test_a_wrong_key_for_google_is_refused_with_the_field_and_the_remedy(google: GoogleServer) -> None:
    """Google's token endpoint refuses a signature; without a key there is nothing to sign with."""
    missing = {GOOGLE_KEY_VARIABLE: ""}
    for keys, why in ((google.wrong_keys, "invalid_grant"), (missing, "key.json is not the JSON key of a")):
        with faulty(google, lambda _request, _number: None) as proxy:  # its port: a client of its own
            refusal = _refusal(google.spec(proxy.port), keys)
        start = (
            "checkpoint.store.secret=keys: its credentials give no access to gs://runs/jobs: correct key.json"
        )
        assert refusal.startswith(start) and why in refusal, refusal


def test_requests_to_google_have_a_token_and_need_permission(google: GoogleServer) -> None:
    """The proxy lets nobody in without a token that the token endpoint has issued for the signed request."""
    forbidden = False

    def choose(request: web.Request, _number: int) -> int | None:
        if not google.google.accepts(request.headers):
            return 401
        return 403 if forbidden else None

    with faulty(google, choose) as proxy:
        spec = google.spec(proxy.port)
        await_store(JobFolder.of(spec, Path("/store/signed")).store, spec, print, SYSTEM_CLOCK)
        assert proxy.fired.total() == 0
        forbidden = True
        assert "or what they may do in the bucket" in _refusal(spec, google.keys)
        assert proxy.fired["403"] >= 1


def test_without_a_secret_the_identity_of_the_pod_is_used(google: GoogleServer) -> None:
    """As with Workload Identity: the process gets its token from the metadata server."""
    (google.folder("of-a-pod") / "x").write_text("found")

    def choose(request: web.Request, _number: int) -> int | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return None if google.google.issued.get(token) == "metadata" else 401

    with faulty(google, choose) as proxy:
        spec = google.spec(proxy.port).model_copy(update={"secret": None})
        read = subprocess.run(
            [sys.executable, "-c", _READ, spec.model_dump_json(by_alias=True, exclude_none=True)],
            env=os.environ | google.google.metadata,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert read.stdout == "found\n", read.stderr[-2000:]
        assert proxy.fired.total() == 0


def test_a_server_that_is_away_is_waited_for(server: ObjectServer) -> None:
    said: list[str] = []

    def report(message: str) -> None:
        said.append(message)
        if len(said) == 1:
            server.start()

    server.stop()
    await_store(server.folder("away"), server.spec(), report, SYSTEM_CLOCK)
    assert f"checkpoint.store.uri={server.scheme}://runs/jobs: the store does not answer" in said[0]
