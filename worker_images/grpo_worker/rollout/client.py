"""Generates the samples of one step over all engines; failed requests move to another engine."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from grpo_worker.data.source import Prompt
from grpo_worker.rollout.routing import EngineTable
from grpo_worker.rollout.sampling import Sample, sampling_seed

log = logging.getLogger(__name__)
ENGINE_PORT = 30000


class RolloutClient:
    """Token ids in, token ids and log-probabilities out."""

    def __init__(
        self, table: EngineTable, *, seed: int, n: int, temperature: float, max_tokens: int,
        eos_id: int, timeout: float,
    ) -> None:  # fmt: skip
        self._table = table
        self._seed = seed
        self._n = n
        self._timeout = timeout
        self._params = {
            "max_new_tokens": max_tokens,
            "temperature": temperature,
            "stop_token_ids": [eos_id],
        }
        self._http = httpx.Client(timeout=timeout)
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="generate")
        self.retries = 0

    def generate(self, prompts: list[Prompt], version: int) -> list[Sample]:
        """``n`` samples of each prompt at exactly ``version``, in the prompts' order.

        Raises TimeoutError when no engine served the version for ``timeout`` seconds.
        """
        groups = self._threads.map(lambda prompt: self._group(prompt, version), prompts)
        return [sample for group in groups for sample in group]

    def _group(self, prompt: Prompt, version: int) -> list[Sample]:
        deadline = time.monotonic() + self._timeout
        while True:
            with self._table.lease(version, max(deadline - time.monotonic(), 0.0)) as engine:
                try:
                    return self._request(engine.name, engine.address, prompt, version)
                except (httpx.HTTPError, ValueError) as error:
                    log.warning("prompt %d on %s: %r; trying elsewhere", prompt.index, engine.name, error)
                    self._table.suspect(engine.name, f"request failed: {error!r}")
                    self.retries += 1

    def _request(self, name: str, address: str, prompt: Prompt, version: int) -> list[Sample]:
        seeds = [sampling_seed(self._seed, prompt.index, number) for number in range(self._n)]
        response = self._http.post(
            f"http://{address}:{ENGINE_PORT}/generate",
            json={
                "input_ids": [list(prompt.ids)] * self._n,
                "sampling_params": [self._params | {"sampling_seed": seed} for seed in seeds],
                "return_logprob": True,
            },
        )
        response.raise_for_status()
        outputs = response.json()
        return [_sample(name, prompt, k, output, version) for k, output in enumerate(outputs)]


def _sample(engine: str, prompt: Prompt, number: int, output: dict[str, Any], version: int) -> Sample:
    meta = output["meta_info"]
    if meta["weight_version"] != str(version):
        raise ValueError(f"answered with version {meta['weight_version']}, wanted {version}")
    if meta["finish_reason"]["type"] == "abort":
        raise ValueError(f"aborted: {meta['finish_reason'].get('message')}")
    log_probs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"])
    ids = tuple(int(token) for token in output["output_ids"])
    return Sample(prompt.index, number, ids, log_probs, version, engine)
