"""Control client of one SGLang server (0.5.16 to 0.5.23): liveness, version, and the update session."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from grpo_worker.weightsync.protocol.digest import digest
from grpo_worker.weightsync.protocol.direct_load import MARK, DirectLoad
from grpo_worker.weightsync.protocol.tiling import TensorPlan

# What the server answers by itself, whatever its scheduler does.
_WITHOUT_SCHEDULER = frozenset({"/model_info", "/pause_generation", "/continue_generation"})
_SHORT = 5.0  # seconds


class EngineError(RuntimeError):
    """The engine refused or did not answer; the message names the call."""


class Engine:
    """One server. ``timeout`` (seconds) bounds every call. ``admin_key``: file with the key to the
    control routes, which appears when the engine's container starts."""

    def __init__(self, url: str, timeout: float, admin_key: Path | None = None) -> None:
        self.url = url
        self._admin_key = admin_key
        self._client = httpx.Client(base_url=url, timeout=timeout)
        self._timeout = timeout
        self._silent_since: float | None = None

    def alive(self) -> bool:
        """Does the server answer? Cheap, and safe while it generates."""
        try:
            return self._client.get("/ping", timeout=_SHORT).status_code == 200
        except httpx.HTTPError:
            return False

    def silence(self) -> float:
        """Seconds since the first call that the scheduler has left unanswered; 0 after any answer."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def forget(self) -> None:
        """The server is another one now."""
        self._silent_since = None

    def listen(self) -> None:
        """Raises EngineError while the scheduler is silent: what is asked of it meanwhile is not undone by
        giving up, but stands in its queue before all that comes later."""
        if self._silent_since is not None:
            self._call("GET", "/server_info", timeout=_SHORT)

    def weight_version(self) -> str:
        """The version that the server reports; ``default`` before the first update."""
        return str(self._call("GET", "/model_info")["weight_version"])

    def join_group(
        self, address: str, port: int, group: str, world: int, first: int = 1, backend: str = "gloo"
    ) -> bool:
        """Join the update group as rank ``first`` and up; returns when the group is complete.

        True for an engine that takes direct loads.
        """
        answer = self._call(
            "POST",
            "/init_weights_update_group",
            master_address=address,
            master_port=port,
            rank_offset=first,
            world_size=world,
            group_name=group,
            backend=backend,
        )
        return MARK in str(answer.get("message", ""))

    def leave_group(self, group: str) -> None:
        self._call("POST", "/destroy_weights_update_group", group_name=group)

    def pause(self) -> None:
        """Stop generating; running requests go back to the queue."""
        self._call("POST", "/pause_generation", mode="retract")

    def resume(self) -> None:
        self._call("POST", "/continue_generation")

    def release_memory(self, parts: Sequence[str]) -> None:
        """Give the GPUs' memory of ``parts`` (weights, kv_cache) back: what was in it is lost, and requests
        that still run are ended."""
        self._call("POST", "/pause_generation", mode="abort")
        self._call("POST", "/release_memory_occupation", tags=list(parts))

    def take_memory(self, parts: Sequence[str]) -> None:
        """Make room for ``parts`` again, at the same addresses; what is in it is undefined."""
        self._call("POST", "/resume_memory_occupation", tags=list(parts))

    def begin_update(self) -> None:
        """Open an update session, if the engine knows such; those before 0.5.23 do not."""
        self._call("POST", "/begin_weight_update", may_be_absent=True)

    def end_update(self) -> None:
        self._call("POST", "/end_weight_update", may_be_absent=True)

    def receive(self, group: str, tensors: Sequence[TensorPlan], version: str | None) -> None:
        """Receive one flattened bucket by broadcast; ``version`` is set with the last one."""
        body = self._tensors(group, tensors) | {
            "load_format": "flattened_bucket", "flush_cache": version is not None
        }  # fmt: skip
        if version is not None:
            body["weight_version"] = version
        self._call("POST", "/update_weights_from_distributed", **body)

    @staticmethod
    def _tensors(group: str, tensors: Sequence[TensorPlan]) -> dict[str, Any]:
        return {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
        }

    def receive_all(
        self, group: str, tensors: Sequence[TensorPlan], version: str, load: DirectLoad
    ) -> dict[str, Any]:
        """Receive a whole version, bucket after bucket, straight into the parameters.

        Returns what the engine did: copies, byLoader, recorded, seconds.
        """
        body = self._tensors(group, tensors) | {
            "load_format": load.to_load_format(), "flush_cache": True, "weight_version": version
        }  # fmt: skip
        message = str(self._call("POST", "/update_weights_from_distributed", **body)["message"])
        start = message.find("{")  # SGLang adds words of its own
        return dict(json.JSONDecoder().raw_decode(message[max(start, 0) :])[0])

    def checksum(self) -> str:
        """Digest over the checksums of all weights inside the engine, rank by rank."""
        report = self._call("POST", "/weights_checker", action="checksum")
        return digest(json.dumps(report["ranks"], sort_keys=True).encode())

    def _headers(self) -> dict[str, str]:
        if self._admin_key is None or not self._admin_key.is_file():
            return {}
        return {"authorization": f"Bearer {self._admin_key.read_text()}"}

    def _call(
        self, method: str, path: str, may_be_absent: bool = False, timeout: float | None = None, **body: Any
    ) -> Any:
        started, limit = time.monotonic(), timeout or self._timeout
        try:
            sent = body if method == "POST" else None
            response = self._client.request(method, path, json=sent, headers=self._headers(), timeout=limit)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.ReadTimeout):
                self._silent_since = self._silent_since or started
            raise EngineError(f"{path}: {error!r}") from error
        if path not in _WITHOUT_SCHEDULER:
            self._silent_since = None
        if response.status_code == 404 and may_be_absent:
            return {}
        if response.status_code != 200:
            raise EngineError(f"{path}: HTTP {response.status_code}: {response.text[:256]}")
        data = response.json() if response.headers["content-type"].startswith("application/json") else {}
        if isinstance(data, dict) and data.get("success") is False:
            raise EngineError(f"{path}: {data.get('message', '')[:256]}")
        return data
