"""Client of one SGLang server's control routes (0.5.16 to 0.5.23): liveness, version, weight updates."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import urllib3

from grpo_worker.common import tls
from grpo_worker.common.patient_http import UNLIMITED
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous
from grpo_worker.weightsync.protocol.digest import digest
from grpo_worker.weightsync.protocol.direct_load import FETCHED, LINK_INSTALL, LINK_LOAD, DirectLoad, Fetch
from grpo_worker.weightsync.protocol.tiling import TensorPlan

# Routes that the server answers without its scheduler.
_WITHOUT_SCHEDULER = frozenset({"/model_info", "/pause_generation", "/continue_generation"})
_NO_CONTROL = frozenset({"/ping", "/model_info"})  # routes that need the other key
_SHORT = 5.0  # seconds
_SERVED = re.compile(r"Weight version updated to (\S+)\.")


class EngineError(RuntimeError):
    """The engine refused a call or did not answer; the message names the route."""


class Engine:
    """Client of one server.

    ``timeout``: seconds of every call. ``admin_key``: file with the key of the control routes; the engine's
    container writes it when it starts. ``hosts``: rendezvous of an engine of several hosts. ``api_key``: file
    with the key of all other routes of an engine that serves users.
    """

    def __init__(
        self, url: str, timeout: float, admin_key: Path | None = None, hosts: HostRendezvous | None = None,
        api_key: Path | None = None,
    ) -> None:  # fmt: skip
        self.url = url
        self._hosts = hosts
        self._admin_key, self._api_key = admin_key, api_key
        # Its requests take the agent half as long as httpx's, which counts: some are made during the pause.
        # Those of other threads than the one that updates have connections of their own.
        verify = tls.own()
        secure: dict[str, Any] = {} if verify is True else {"ssl_context": verify, "assert_hostname": False}
        self._pool = urllib3.PoolManager(maxsize=8, retries=False, **secure)
        self._generate = tls.generate_headers()
        self.timeout = timeout
        self._unresponsive_since: float | None = None
        self._has_sessions = True  # until it says otherwise

    def alive(self) -> bool:
        """Return whether the servers of all hosts run; the request does not reach their schedulers."""
        if self._hosts is not None and self._hosts.problem():
            return False
        try:
            return self._request("GET", "/ping", _SHORT).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def unresponsive_seconds(self) -> float:
        """Return the seconds since the first unanswered call to the scheduler; 0 after any answer of it."""
        since = self._unresponsive_since
        return 0.0 if since is None else time.monotonic() - since

    def on_silent(self) -> None:
        """Note that the scheduler has stopped to answer."""
        self._unresponsive_since = self._unresponsive_since or time.monotonic()

    def on_replaced(self) -> None:
        """Note that the server was replaced by a new process."""
        self._unresponsive_since = None
        self._has_sessions = True

    def check_responsive(self) -> None:
        """Raise EngineError if the scheduler is still unresponsive.

        A request that timed out stays in the scheduler's queue and delays every later one. Callers therefore
        check before they send more.
        """
        if self._unresponsive_since is not None:
            self._call("GET", "/server_info", timeout=_SHORT)

    def weight_version(self) -> str:
        """Return the version that the server reports; ``default`` before the first update."""
        return str(self._call("GET", "/model_info")["weight_version"])

    def join_group(
        self, address: str, port: int, group: str, world: int, first: int = 1, backend: str = "gloo",
        timeout: float | None = None,
    ) -> str:  # fmt: skip
        """Let the engine's ranks join an update group as ranks ``first`` and up; wait until it is complete.

        ``timeout``: seconds; None: those of every call. Returns the engine's answer, with a mark if it
        supports direct loads.
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
            timeout=timeout,
        )
        return str(answer.get("message", ""))

    def leave_group(self, group: str) -> None:
        self._call("POST", "/destroy_weights_update_group", group_name=group)

    def pause(self) -> None:
        """Stop generation; running requests return to the queue."""
        self._call("POST", "/pause_generation", mode="retract")

    def resume(self) -> None:
        self._call("POST", "/continue_generation")

    def release_memory(self, parts: Sequence[str]) -> None:
        """Release the GPUs' memory of ``parts`` (weights, kv_cache).

        Its content is lost, and running requests are aborted.
        """
        self._call("POST", "/pause_generation", mode="abort")
        self._call("POST", "/release_memory_occupation", tags=list(parts))

    def resume_memory(self, parts: Sequence[str]) -> None:
        """Allocate the memory of ``parts`` again, at the same addresses; its content is undefined."""
        self._call("POST", "/resume_memory_occupation", tags=list(parts))

    def begin_update(self) -> None:
        """Open an update session; engines before 0.5.23 have none, which is no error."""
        self._session("/begin_weight_update")

    def end_update(self) -> None:
        self._session("/end_weight_update")

    def _session(self, path: str) -> None:
        """Call a route of sessions, unless the engine has none: each call lengthens the pause."""
        if self._has_sessions:
            self._has_sessions = self._call("POST", path, may_be_absent=True) is not None

    def receive(self, group: str, tensors: Sequence[TensorPlan], version: str | None) -> None:
        """Receive one flattened bucket by broadcast. ``version``: given with the last bucket only."""
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
        self,
        group: str,
        tensors: Sequence[TensorPlan],
        version: str,
        load: DirectLoad,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Receive a whole version by a direct load, within ``timeout`` seconds; None: those of every call.

        Returns the engine's report: copies, byLoader, recorded, seconds, fingerprints, extraBytes, received.
        """
        body = self._tensors(group, tensors) | {
            "load_format": load.to_load_format(), "flush_cache": True, "weight_version": version
        }  # fmt: skip
        return _report(self._call("POST", "/update_weights_from_distributed", timeout=timeout, **body))

    def receive_over(self, link: str, version: str, patience: float, keep_buffers: bool) -> dict[str, Any]:
        """Receive a whole version over a link, which ends when a rank waits ``patience`` seconds for a wave.

        The engine pauses for it, and resumes when it has it. ``keep_buffers``: it keeps the memory of its
        buffers for the next version. Returns its report: seconds, received, checksum, weightVersion.
        """
        return self._whole_update(link, f"{LINK_LOAD}{patience}", version, keep_buffers, UNLIMITED)

    def fetched(self, fetch: Fetch) -> bool:
        """Begin to receive a version beside generation, or ask again; return whether all ranks have it."""
        return FETCHED in self.join_group("", 0, fetch.to_group_name(), 0)

    def install(self, link: str, version: str, keep_buffers: bool) -> dict[str, Any]:
        """Install a version that was fetched over a link; otherwise as ``receive_over``."""
        return self._whole_update(link, f"{LINK_INSTALL}{version}", version, keep_buffers, None)

    def _whole_update(
        self, link: str, load_format: str, version: str, keep_buffers: bool, timeout: float | None
    ) -> dict[str, Any]:
        body = self._tensors(link, ()) | {
            "load_format": load_format, "flush_cache": True, "weight_version": version,
            "torch_empty_cache": not keep_buffers,
        }  # fmt: skip
        return _report(self._call("POST", "/update_weights_from_distributed", timeout=timeout, **body))

    def checksum(self) -> str:
        """Return the digest of the checksums of all weights in the engine, rank by rank."""
        report = self._call("POST", "/weights_checker", action="checksum")
        return digest(json.dumps(report["ranks"], sort_keys=True).encode())

    def start_profile(self, folder: Path, identity: str, steps: int) -> None:
        """Let torch's profiler record the next ``steps`` forward passes of every rank into ``folder``.

        Without a first step the server would record at once, and its loop while it has no requests.
        """
        self._call(
            "POST", "/start_profile", output_dir=str(folder), profile_id=identity, start_step=1,
            num_steps=steps, activities=["CPU", "GPU"], with_stack=False, record_shapes=False,
        )  # fmt: skip

    def await_scheduler(self) -> None:
        """Return when the scheduler has answered: it has finished what it did before."""
        self._call("GET", "/server_info")

    def _request(self, method: str, path: str, timeout: float, body: Any = None) -> urllib3.BaseHTTPResponse:
        headers = (path in _NO_CONTROL and self._other_headers()) or _bearer(self._admin_key)
        return self._pool.request(method, self.url + path, json=body, headers=headers, timeout=timeout)

    def _other_headers(self) -> dict[str, str]:
        return _bearer(self._api_key) if self._api_key is not None else self._generate

    def _call(
        self, method: str, path: str, may_be_absent: bool = False, timeout: float | None = None, **body: Any
    ) -> Any:
        started, limit = time.monotonic(), self.timeout if timeout is None else timeout
        try:
            response = self._request(method, path, limit, body if method == "POST" else None)
        except urllib3.exceptions.HTTPError as error:
            if isinstance(error, urllib3.exceptions.ReadTimeoutError):
                self._unresponsive_since = self._unresponsive_since or started
            raise EngineError(f"{path}: {error!r}") from error
        if path not in _WITHOUT_SCHEDULER:
            self._unresponsive_since = None
        if response.status == 404 and may_be_absent:
            return None
        if response.status != 200:
            text = response.data.decode(errors="replace")
            raise EngineError(f"{path}: HTTP {response.status}: {text[:256]}")
        is_json = response.headers.get("content-type", "").startswith("application/json")
        answer = response.json() if is_json else {}
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path}: {answer.get('message', '')[:256]}")
        return answer


def _bearer(key: Path | None) -> dict[str, str]:
    """Return the HTTP headers with the key in a file; none while there is no such file."""
    if key is None or not key.is_file():
        return {}
    return {"authorization": f"Bearer {key.read_text()}"}


def _report(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a load, and the version that is served now, from the text that SGLang adds."""
    message = str(answer["message"])
    start = message.find("{")
    report = dict(json.JSONDecoder().raw_decode(message[max(start, 0) :])[0])
    served = _SERVED.search(message)
    return report | {"weightVersion": served[1]} if served else report
