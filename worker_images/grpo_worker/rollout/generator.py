"""Generation of samples: each on one engine, and on another one from the tokens so far when that fails."""

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.metrics.generation import Counts
from grpo_worker.rollout.dispatcher import Dispatcher, Lease
from grpo_worker.rollout.engine_http import EngineHttp
from grpo_worker.rollout.sample_watch import SampleWatch
from grpo_worker.rollout.sampling import PromptRefusedError, Sample, UnfitEngineError, sampling_seed
from grpo_worker.rollout.stream import AbortedError, Chunk, EngineFailedError, RequestRefusedError, chunks
from grpo_worker.rollout.unfinished import Unfinished

log = logging.getLogger(__name__)
REFUSALS = 3  # by different engines, or by all that serve: the request itself is at fault
RETRY_SECONDS = 1.0  # after a failure that says nothing about the engine's health
_REFUSED = (400, 422)


@dataclass(frozen=True, slots=True)
class Wishes:
    """Parameters of all requests: see ``RolloutClient.set_sampling``."""

    params: Mapping[str, Any]
    experts: ExpertLayers | None = None


class Generator:
    """Draws the samples of prompts. All methods run in the event loop."""

    def __init__(
        self, dispatcher: Dispatcher, http: EngineHttp, watch: SampleWatch, *, seed: int, n: int,
        partial: bool,
    ) -> None:  # fmt: skip
        """Create a generator of ``n`` samples a prompt; ``partial`` as for RolloutClient."""
        self._dispatcher, self._http, self._watch = dispatcher, http, watch
        self._seed, self._n, self._partial = seed, n, partial
        self._orders = itertools.count()
        self.counts = Counts()

    async def group(self, prompt: Prompt, version: int, wishes: Wishes) -> list[Sample]:
        """Return the samples of a prompt, in the order of their numbers.

        Raises PromptRefusedError when engines refuse the prompt, UnfitEngineError when one lacks a feature of
        the job, TimeoutError when no engine serves the version.
        """
        refused: list[str] = []  # names of engines
        tasks = []
        for number in range(self._n):
            seed = sampling_seed(self._seed, prompt.index, number)
            work = Unfinished(prompt, number, seed, wishes.params, wishes.experts)
            tasks.append(asyncio.create_task(self._sample(work, version, next(self._orders), refused)))
        try:
            return list(await asyncio.gather(*tasks))
        except PromptRefusedError:
            self.counts.refused += 1
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._dispatcher.forget(prompt.index)

    async def _sample(self, work: Unfinished, version: int, order: int, refused: list[str]) -> Sample:
        avoid: set[str] = set()
        with self._watch.waiting():
            while True:
                tokens = len(work.prompt.ids) + work.kept
                lease = await self._dispatcher.acquire(
                    order, version, work.prompt.index, tokens, avoid | set(refused)
                )
                name, pause = lease.entry.name, 0.0
                try:
                    await self._attempt(lease, work, version)
                    sample = work.sample(name)
                    self._watch.accepted()
                    return sample
                except RequestRefusedError as error:
                    self._refuse(work, version, name, refused, error)
                except (httpx.HTTPError, EngineFailedError) as error:
                    self._failed(work, name, error)
                    self._dispatcher.suspect(lease, f"request failed: {error!r}")
                except TimeoutError:  # the dispatcher knows why
                    self._failed(work, name, None)
                except (ValueError, KeyError, TypeError) as error:
                    self._failed(work, name, error, trusted=isinstance(error, AbortedError))
                    pause = RETRY_SECONDS
                finally:
                    self._dispatcher.release(lease)
                await asyncio.sleep(pause)
                avoid = {name}
                if work.complete:  # the engine failed after the last token
                    self._watch.accepted()
                    return work.sample(name)

    def _failed(self, work: Unfinished, engine: str, error: Exception | None, trusted: bool = True) -> None:
        work.cut(trusted)
        log.warning(
            "sample %d.%d on %s: %s; %d tokens are kept", work.prompt.index, work.number, engine,
            repr(error) if error else "silent", work.kept,
        )  # fmt: skip
        if error is not None:
            self._watch.problem(f"{engine}: {error!r}")
        self.counts.retries += 1
        self.counts.continued += work.kept > 0

    def _refuse(
        self, work: Unfinished, version: int, engine: str, refused: list[str], error: RequestRefusedError
    ) -> None:
        """Count a refusal; raise PromptRefusedError when no other engine can be expected to accept."""
        work.cut()
        refused.append(engine)
        text = f"{engine} refuses to sample: {error}"
        self._watch.problem(text)
        everyone = self._dispatcher.serving(version) <= set(refused)
        if len(set(refused)) >= REFUSALS or (everyone and len(refused) >= REFUSALS):
            raise PromptRefusedError(work.prompt, f"{text} ({len(refused)} times)") from error

    async def _attempt(self, lease: Lease, work: Unfinished, version: int) -> None:
        """Stream one request until the answer is complete. Raises an error when it ends before."""
        finished, address = False, lease.entry.address
        async with asyncio.timeout(None) as lease.scope:
            async with self._http.post(address, "/generate", work.request(lease.place.rank)) as response:
                await _check(response)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for chunk in chunks(response.stream):
                    self.counts.tokens += self._take(lease, work, chunk, version)
                    self._dispatcher.moved(lease)
                    finished = finished or chunk.finished
        if not finished:
            raise httpx.RemoteProtocolError("the stream ended before the answer")

    def _take(self, lease: Lease, work: Unfinished, chunk: Chunk, version: int) -> int:
        try:
            return work.take(chunk, version, None if self._partial else version)
        except UnfitEngineError as error:
            raise UnfitEngineError(
                f"staleness.partialRollouts: {lease.entry.name} does not report the weight version of each "
                "token: use an image with SGLang 0.5.23 or later"
            ) from error


async def _check(response: httpx.Response) -> None:
    """Raise the error of a response that is no stream."""
    if response.status_code in _REFUSED:
        await response.aread()
        raise RequestRefusedError(f"HTTP {response.status_code}: {_refusal(response)}")
    response.raise_for_status()


def _refusal(response: httpx.Response) -> str:
    """Return SGLang's error message from a refused request."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:500]
