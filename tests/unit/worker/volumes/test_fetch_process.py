"""The init container's process, polled as by the operator."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from grpo_operator.api.v1alpha1.volumes import COMPLETE
from support.fetching import FIELD, FILES, LARGE, until
from support.objects import job
from support.stand_in_hub import StandInHub

START = """
import sys
from grpo_worker.controller.status import server
server.PORT = int(sys.argv.pop(1))
from grpo_worker.volumes.fetch import main
main()
"""


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with StandInHub(dict(FILES), large=LARGE) as server:
        yield server


class InitContainer:
    """The process, on a port of its own."""

    def __init__(self, hub: StandInHub, place: Path, token: str | None = None, **more: Any) -> None:
        given = {"mountPath": "/models", "uri": "hf://org/model", "endpoint": hub.url} | more
        spec = job(model={"path": "/models/a", "volume": given})["spec"]
        config = {
            "name": "j", "namespace": "default", "rolloutService": "r", "minAvailable": 1, "fp8": False,
            "weightPath": {}, "writer": "j-1", "store": "/store/j", "spec": spec,
        }  # fmt: skip
        (place / "job.json").write_text(json.dumps(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        env = os.environ | {"GRPO_JOB_FILE": str(place / "job.json"), "POD_NAME": "pod-0"}
        if token is not None:
            env["GRPO_MODEL_CREDENTIAL"] = token
        arguments = [str(self.port), f"model={place / 'store'}"]
        self.process = subprocess.Popen([sys.executable, "-c", START, *arguments], env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def status(self) -> dict[str, Any]:
        try:
            return dict(httpx.get(f"http://127.0.0.1:{self.port}/v1/status", timeout=5).json())
        except httpx.TransportError:
            return {}


def test_the_operator_sees_the_progress(hub: StandInHub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": b"0" * 1_000_000}
    hub.pause = 0.02
    seen: set[str] = set()
    with InitContainer(hub, tmp_path) as container:
        while container.process.poll() is None:
            seen.add(container.status().get("message", ""))
            time.sleep(0.05)
    assert container.process.returncode == 0
    shown = sorted(text for text in seen if text.startswith(f"fetching {FIELD}: "))
    assert len(shown) >= 2 and all(text.endswith(" of 1.0 MB") for text in shown)


@pytest.mark.parametrize(
    ("credential", "phase", "message"),
    [
        (None, "Starting", f"{FIELD}.credential: Secret hub has no key token: kubectl create secret"),
        ("x", "Failed", f"{FIELD}.uri=hf://org/model: 401: the credential"),
        (
            "two words",
            "Failed",
            f"{FIELD}.credential: key token of Secret hub contains characters that",
        ),
    ],
)
def test_the_operator_sees_what_is_wrong_with_a_credential(
    credential: str | None, phase: str, message: str, hub: StandInHub, tmp_path: Path
) -> None:
    hub.token = "secret"
    with InitContainer(hub, tmp_path, credential, credential={"secret": "hub"}) as container:
        until(lambda: container.status().get("message"))
        status = container.status()
        assert (status["phase"], status["engines"]) == (phase, [])
        assert status["message"].startswith(message) and "two words" not in status["message"]
        assert httpx.get(f"http://127.0.0.1:{container.port}/healthz").text == "ok"


def test_a_complete_volume_needs_no_credential(hub: StandInHub, tmp_path: Path) -> None:
    """A rescheduled controller starts although the Secret has been deleted."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / COMPLETE).touch()
    with InitContainer(hub, tmp_path, credential={"secret": "hub"}) as container:
        assert container.process.wait() == 0
    assert hub.requests == []
