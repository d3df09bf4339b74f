"""Generation of samples: each on one engine, and on another one from the tokens so far when that fails."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.metrics.generation import Counts
from grpo_worker.rollout.dispatcher import Dispatcher
from grpo_worker.rollout.engine_http import EngineHttp
from grpo_worker.rollout.evidence import ADVANCE, FAILURES, Evidence, Served
from grpo_worker.rollout.given_up import GivenUp, Part
from grpo_worker.rollout.lease import Lease
from grpo_worker.rollout.refusals import check, is_internal
from grpo_worker.rollout.sample_watch import SampleWatch
from grpo_worker.rollout.sampling import PromptRefusedError, Sample, UnfitEngineError, sampling_seed
from grpo_worker.rollout.stream import (
    AbortedError,
    BusyError,
    Chunk,
    EngineFailedError,
    RequestRefusedError,
    chunks,
)
from grpo_worker.rollout.unfinished import Unfinished

log = logging.getLogger(__name__)
REFUSALS = 3  # by different engines, or by all that serve: the request itself is at fault
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before the next attempt of a sample that makes no progress
_LAST = 2**62  # order of the first sample behind all others
Arrived = Callable[[Sample], None]


class ControlFailedError(Exception):
    """An engine that is to try a suspected prompt does not serve a good one."""


_FAILURES = (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError, ControlFailedError)
_ENGINE_FAILED = (httpx.HTTPError, EngineFailedError, ControlFailedError)
_TRUSTED = (*_ENGINE_FAILED, TimeoutError, AbortedError)  # the tokens that came before are good
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(frozen=True, slots=True)
class Wishes:
    """Parameters of all requests: see ``RolloutClient.set_sampling``."""

    params: Mapping[str, Any]
    experts: ExpertLayers | None = None


class Generator:
    """Draws the samples of prompts. All methods run in the event loop."""

    def __init__(
        self, dispatcher: Dispatcher, http: EngineHttp, watch: SampleWatch, *, seed: int, n: int,
        partial: bool, last: bool = False, share: float = 1.0,
    ) -> None:  # fmt: skip
        """Create a generator of ``n`` samples a prompt; ``partial`` as for RolloutClient.

        ``last``: its samples wait until those of all other generators have engines. ``share``: of the
        engines that it uses.
        """
        self._dispatcher, self._http, self._watch = dispatcher, http, watch
        self._seed, self._n, self._partial, self._share = seed, n, partial, share
        self._orders = itertools.count(_LAST if last else 0)
        self._served = Served()
        self._given_up = GivenUp()
        self._evidence: dict[int, list[Evidence]] = {}  # against prompts whose groups were given up
        self._verdicts: dict[int, str] = {}  # prompts that make engines fail; a step may submit them again
        self.counts = Counts()

    async def group(
        self, prompt: Prompt, version: int, wishes: Wishes, arrived: Arrived | None = None
    ) -> list[Sample]:
        """Return the samples of a prompt, in the order of their numbers.

        ``arrived``: called with each of them as soon as it is complete; it must not block.

        Raises PromptRefusedError when engines refuse the prompt or fail at it, UnfitEngineError when one
        lacks a feature of the job, TimeoutError when no engine serves the version. After a TimeoutError the
        same call goes on with the samples and tokens that there were.
        """
        if prompt.index in self._verdicts:
            raise PromptRefusedError(prompt, self._verdicts[prompt.index])
        refused: list[str] = []  # names of engines
        evidence = self._evidence.pop(prompt.index, None) or [Evidence() for _ in range(self._n)]
        parts = self._given_up.take(prompt.index, version) or self._begin(prompt, wishes)
        tasks = []
        for part in parts:
            sample = self._sample(part, version, next(self._orders), refused, evidence)
            tasks.append(asyncio.create_task(_announced(sample, arrived)))
        unserved = False
        try:
            samples = list(await asyncio.gather(*tasks))
            evidence = []
            return samples
        except PromptRefusedError:
            self.counts.refused += 1
            evidence = []
            raise
        except TimeoutError:
            unserved = True
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._dispatcher.forget(prompt.index)
            if unserved:
                self._given_up.keep(prompt.index, version, parts, tasks)
            if any(one.suspect for one in evidence):  # for when the prompt is submitted again
                self._evidence[prompt.index] = evidence

    def forget(self) -> None:
        """Forget groups that were given up: later calls use other weights."""
        self._given_up.forget()

    def _begin(self, prompt: Prompt, wishes: Wishes) -> list[Part]:
        seeds = [sampling_seed(self._seed, prompt.index, number) for number in range(self._n)]
        return [
            Unfinished(prompt, number, seed, wishes.params, wishes.experts)
            for number, seed in enumerate(seeds)
        ]

    async def _sample(
        self, work: Part, version: int, order: int, refused: list[str], group: list[Evidence]
    ) -> Sample:
        if isinstance(work, Sample):
            return work
        evidence, avoid, fruitless = group[work.number], set[str](), 0
        with self._watch.waiting():
            while True:
                tokens = len(work.prompt.ids) + work.kept
                lease = await self._dispatcher.acquire(
                    order, version, work.prompt.index, tokens, avoid | set(refused) | evidence.engines,
                    lambda: any(other.suspect for other in group), self._share,
                )  # fmt: skip
                name, failure = lease.entry.name, None
                try:
                    if lease.trial:
                        await self._control(lease, work.prompt)
                    await self._attempt(lease, work, version, evidence)
                    sample = work.sample(name)
                    evidence.acquit()
                    return sample
                except RequestRefusedError as error:
                    self._refuse(work, version, name, refused, error)
                except _FAILURES as error:
                    failure = error
                    went_on = self._failed(lease, work, evidence, error)
                finally:
                    self._dispatcher.release(lease)
                avoid = {name}
                if work.complete:  # the engine failed after the last token
                    evidence.acquit()
                    return work.sample(name)
                if failure is not None:
                    fruitless = 0 if went_on else fruitless + 1
                    await self._consider(lease, work, version, evidence, failure, fruitless)

    def _failed(self, lease: Lease, work: Unfinished, evidence: Evidence, error: Exception) -> bool:
        """End an attempt that failed; return whether it has made progress."""
        sent = not isinstance(error, (*_UNSENT, ControlFailedError))
        went_on = sent and not evidence.ended(work.kept)
        work.cut(trusted=isinstance(error, _TRUSTED))
        entry = lease.entry
        log.warning(
            "sample %d.%d on %s: %s; %d tokens are kept", work.prompt.index, work.number, entry.name,
            "silent" if isinstance(error, TimeoutError) else repr(error), work.kept,
        )  # fmt: skip
        if not isinstance(error, TimeoutError):  # the dispatcher knows why
            self._watch.problem(f"{entry.name}: {error!r}")
        self.counts.retries += 1
        self.counts.continued += work.kept > 0
        answered = isinstance(error, (httpx.HTTPStatusError, EngineFailedError))
        if isinstance(error, _ENGINE_FAILED) and not (answered and self._served.others(entry, work.prompt)):
            self._dispatcher.suspect(lease, f"request failed: {error!r}", answered)
        return went_on

    async def _consider(
        self, lease: Lease, work: Unfinished, version: int, evidence: Evidence, error: Exception,
        fruitless: int,
    ) -> None:  # fmt: skip
        """Wait before the next attempt; raise PromptRefusedError when the prompt is at fault.

        ``fruitless``: attempts without progress, one after the other. What the agents report in the first
        second may explain the failure: the engine was updated, or its pod has left.
        """
        if not fruitless:
            await asyncio.sleep(0.0 if isinstance(error, (httpx.HTTPError, TimeoutError)) else FIRST_PAUSE)
            return
        await asyncio.sleep(FIRST_PAUSE)
        pause = min(FIRST_PAUSE * 2 ** (fruitless - 1), LONGEST_PAUSE)
        if not self._explained(lease, error):
            evidence.suspect = True
            if self._served.others(lease.entry, work.prompt):
                evidence.charge(lease.entry)
            if evidence.convicts(self._dispatcher.serving(version, self._share)):
                self._verdicts[work.prompt.index] = (
                    f"{lease.entry.name} fails to sample: {error!r} ({evidence.count} times, on engines that "
                    f"serve other prompts: {', '.join(sorted(evidence.engines))})"
                )
                raise PromptRefusedError(work.prompt, self._verdicts[work.prompt.index]) from error
            if evidence.count == FAILURES - 1:  # an outage of the pool must be over before the last trial
                pause = LONGEST_PAUSE
        await asyncio.sleep(pause - FIRST_PAUSE)

    def _explained(self, lease: Lease, error: Exception) -> bool:
        """Return whether a failure has a reason other than the prompt."""
        if isinstance(error, (*_UNSENT, ControlFailedError, BusyError)):
            return True
        if isinstance(error, httpx.HTTPStatusError) and not is_internal(error.response.status_code):
            return True
        if isinstance(error, (httpx.HTTPError, EngineFailedError)):
            return self._dispatcher.left(lease)
        return self._dispatcher.changed(lease)

    async def _control(self, lease: Lease, prompt: Prompt) -> None:
        """Have an engine serve another prompt first, so that a failure of ``prompt`` says something.

        Raises ControlFailedError when it does not.
        """
        control = self._served.control(prompt)
        if control is None or self._served.others(lease.entry, prompt):
            return
        params = {"max_new_tokens": ADVANCE, "temperature": 1.0, "stop_token_ids": []}
        work = Unfinished(control, 0, 0, params)
        try:
            async with self._stream(lease, work) as answer:
                async for _ in answer:
                    self._dispatcher.moved(lease)
        except _FAILURES as error:
            raise ControlFailedError(f"it fails at a prompt that was sampled before: {error!r}") from error
        self._served.note(lease.entry, control)

    def _refuse(
        self, work: Unfinished, version: int, engine: str, refused: list[str], error: RequestRefusedError
    ) -> None:
        """Count a refusal; raise PromptRefusedError when no other engine can be expected to accept."""
        work.cut()
        refused.append(engine)
        text = f"{engine} refuses to sample: {error}"
        self._watch.problem(text)
        everyone = self._dispatcher.serving(version, self._share) <= set(refused)
        if len(set(refused)) >= REFUSALS or (everyone and len(refused) >= REFUSALS):
            raise PromptRefusedError(work.prompt, f"{text} ({len(refused)} times)") from error

    async def _attempt(self, lease: Lease, work: Unfinished, version: int, evidence: Evidence) -> None:
        """Stream one request until the answer is complete. Raises an error when it ends before."""
        finished, start = False, work.kept
        async with self._stream(lease, work) as answer:
            async for chunk in answer:
                self.counts.tokens += self._take(lease, work, chunk, version)
                self._dispatcher.moved(lease)
                self._watch.moved()
                finished = finished or chunk.finished
                if finished or work.kept - start >= ADVANCE:
                    self._served.note(lease.entry, work.prompt)
                if lease.trial and evidence.reached(work.kept):
                    self._dispatcher.passed(lease)
        if not finished:
            raise httpx.RemoteProtocolError("the stream ended before the answer")

    @asynccontextmanager
    async def _stream(self, lease: Lease, work: Unfinished) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Send a request; yield the chunks of its answer."""
        async with asyncio.timeout(None) as lease.scope:
            address, body = lease.entry.address, work.request(lease.place.rank)
            async with self._http.post(address, "/generate", body) as response:
                await check(response)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                yield chunks(response.stream)

    def _take(self, lease: Lease, work: Unfinished, chunk: Chunk, version: int) -> int:
        try:
            return work.take(chunk, version, None if self._partial else version)
        except UnfitEngineError as error:
            raise UnfitEngineError(
                f"staleness.partialRollouts: {lease.entry.name} does not report the weight version of each "
                "token: use an image with SGLang 0.5.23 or later"
            ) from error


async def _announced(sample: Coroutine[Any, Any, Sample], arrived: Arrived | None) -> Sample:
    complete = await sample
    if arrived is not None:
        arrived(complete)
    return complete
