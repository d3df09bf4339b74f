"""Client that generates samples on all engines; a failed request is retried on another engine."""

import logging
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx

from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.sample_watch import SampleWatch
from grpo_worker.rollout.sampling import Sample, UnfitEngineError, sampling_seed

log = logging.getLogger(__name__)
ENGINE_PORT = 30000
_REFUSED = (400, 422)
REFUSALS = 3  # by different engines, or by all that serve: the request itself is at fault
LEASE_SECONDS = 1.0  # longest wait for an engine before a request checks whether it was cancelled


class RequestRefusedError(ValueError):
    """An engine rejected the request as invalid; other engines would reject it too."""


class RolloutClient:
    """Client of all engines: token ids in, token ids and log-probabilities out."""

    def __init__(
        self, table: EngineTable, *, seed: int, n: int, timeout: float, partial: bool = False
    ) -> None:
        """Create a client that draws ``n`` samples of each prompt.

        ``timeout``: seconds for one request, and for the wait until some engine serves a version.
        ``partial``: a sample may continue with newer weights than it began with.
        """
        self._table = table
        self._seed = seed
        self._n = n
        self._timeout = timeout
        self._params: dict[str, Any] = {}
        self._experts: ExpertLayers | None = None
        self._partial = partial
        self._http = httpx.Client(timeout=timeout)
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="generate")
        self.retries = 0
        self._watch = SampleWatch()

    def set_sampling(self, params: dict[str, Any], experts: ExpertLayers | None = None) -> None:
        """Set the parameters of all later requests.

        ``params``: see sampling.sampling_params. ``experts``: layers for which engines return the routed
        experts of each token.
        """
        self._params, self._experts = params, experts

    def stalled(self, limit: float) -> str:
        """Return why no awaited sample was accepted for ``limit`` seconds; "" if one was."""
        return self._watch.stalled(limit)

    def generate(
        self, prompts: list[Prompt], version: int, cancelled: threading.Event | None = None
    ) -> list[Sample]:
        """Return ``n`` samples of each prompt, in the prompts' order.

        All tokens come from ``version``; in ``partial`` mode they may also come from later versions.

        Raises TimeoutError when no engine serves the version for ``timeout`` seconds, UnfitEngineError
        when engines refuse a request or lack a feature of the job, and CancelledError when ``cancelled``
        is set before the end.
        """
        stop = cancelled or threading.Event()
        groups = self._threads.map(lambda prompt: self._group(prompt, version, stop), prompts)
        return [sample for group in groups for sample in group]

    def _group(self, prompt: Prompt, version: int, cancelled: threading.Event) -> list[Sample]:
        deadline = time.monotonic() + self._timeout
        refused: list[str] = []  # names of engines
        with self._watch.waiting():
            while not cancelled.is_set():
                try:
                    with self._table.lease(version, LEASE_SECONDS, self._partial, refused) as engine:
                        samples = self._try(engine, prompt, version)
                except TimeoutError as error:
                    self._watch.problem(str(error), unless_known=True)
                    if time.monotonic() > deadline:
                        raise
                    continue
                except RequestRefusedError as error:
                    refused.append(engine.name)
                    self._watch.problem(str(error))
                    if len(refused) >= REFUSALS and self._all_refuse(refused, version):
                        raise UnfitEngineError(f"{error} ({len(refused)} times)") from error
                    continue
                if samples is not None:
                    self._watch.accepted()
                    return samples
        raise CancelledError

    def _all_refuse(self, refused: list[str], version: int) -> bool:
        """Return whether REFUSALS engines, or all that serve ``version``, have refused the request."""
        return len(set(refused)) >= REFUSALS or {e.name for e in self._table.serving(version)} <= set(refused)

    def _try(self, engine: EngineEntry, prompt: Prompt, version: int) -> list[Sample] | None:
        """Return the samples of one engine, or None when it failed. Raises RequestRefusedError."""
        try:
            return self._request(engine.name, engine.address, prompt, version)
        except RequestRefusedError:
            raise  # the engine is healthy; the request is invalid
        except (httpx.HTTPError, ValueError) as error:
            log.warning("prompt %d on %s: %r; retrying", prompt.index, engine.name, error)
            self._watch.problem(f"{engine.name}: {error!r}")
            self._table.suspect(engine.name, f"request failed: {error!r}")
            self.retries += 1
            return None

    def _request(self, name: str, address: str, prompt: Prompt, version: int) -> list[Sample]:
        seeds = [sampling_seed(self._seed, prompt.index, number) for number in range(self._n)]
        response = self._http.post(
            f"http://{address}:{ENGINE_PORT}/generate",
            json={
                "input_ids": [list(prompt.ids)] * self._n,
                "sampling_params": [self._params | {"sampling_seed": seed} for seed in seeds],
                "return_logprob": True,
            }
            | ({"return_routed_experts": True} if self._experts else {}),
        )
        if response.status_code in _REFUSED:
            raise RequestRefusedError(
                f"{name} refuses to sample: HTTP {response.status_code}: {_refusal(response)}"
            )
        response.raise_for_status()
        outputs = response.json()
        return [self._sample(name, prompt, k, output, version) for k, output in enumerate(outputs)]

    def _sample(
        self, engine: str, prompt: Prompt, number: int, output: dict[str, Any], version: int
    ) -> Sample:
        if self._partial and "weight_versions" not in output["meta_info"]:
            raise UnfitEngineError(
                f"staleness.partialRollouts: {engine} does not report the weight version of each token: use "
                "an image with SGLang 0.5.23 or later"
            )
        sample = _sample(engine, prompt, number, output)
        if sample.version < version or (not self._partial and (sample.spans or sample.version != version)):
            raise ValueError(f"sampled with version {sample.spans or sample.version}, expected {version}")
        if self._experts is None:
            return sample
        tokens = len(prompt.ids) + len(sample.ids) - 1
        return replace(sample, routed=self._experts.decode(output["meta_info"], tokens))


def _refusal(response: httpx.Response) -> str:
    """Return SGLang's error message from a refused request."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:500]


def _sample(engine: str, prompt: Prompt, number: int, output: dict[str, Any]) -> Sample:
    meta = output["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise ValueError(f"aborted: {meta['finish_reason'].get('message')}")
    log_probs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"])
    ids = tuple(int(token) for token in output["output_ids"])
    spans = _spans(meta, len(ids))
    oldest = min(version for version, _ in spans)
    return Sample(prompt.index, number, ids, log_probs, oldest, engine, spans if len(spans) > 1 else ())


def _spans(meta: dict[str, Any], tokens: int) -> tuple[tuple[int, int], ...]:
    """Return (version, end) of consecutive tokens.

    SGLang before 0.5.23 reports one version for a whole response: that of its last token.
    """
    if "weight_versions" not in meta:
        return ((int(meta["weight_version"]), tokens),)
    return tuple((int(span["version"]), int(span["end"])) for span in meta["weight_versions"])
