"""Client of all engines for the rest of the controller: prompts in, groups of samples out."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from typing import Any

import httpx

from grpo_operator.api.names import ENGINE_PORT
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.metrics.generation import Counts
from grpo_worker.rollout.connections import Connections
from grpo_worker.rollout.dispatcher import Dispatcher
from grpo_worker.rollout.engine_http import EngineHttp
from grpo_worker.rollout.engine_load import RankLoad
from grpo_worker.rollout.generator import Arrived, Generator, Wishes
from grpo_worker.rollout.routing import EngineTable
from grpo_worker.rollout.sample_watch import SampleWatch
from grpo_worker.rollout.sampling import Sample

_CANCEL_SECONDS = 0.2  # between two looks at ``cancelled``


class Sampler:
    """Client of the same engines with sampling parameters of its own; its samples wait behind all others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, generator: Generator, wishes: Wishes) -> None:
        self._loop, self._generator, self._wishes = loop, generator, wishes

    def submit(self, prompt: Prompt, version: int, arrived: Arrived | None = None) -> "Future[list[Sample]]":
        """Start to generate a prompt's samples; see ``RolloutClient.submit``."""
        return asyncio.run_coroutine_threadsafe(
            self._generator.group(prompt, version, self._wishes, arrived), self._loop
        )

    def forget(self) -> None:
        """Forget the tokens of groups that no engine served."""
        self._loop.call_soon_threadsafe(self._generator.forget)


class RolloutClient:
    """Client of all engines: token ids in, token ids and log-probabilities out. Thread-safe.

    Requests run in one event loop, in a thread of its own. The number in flight follows the engines: see
    ``Placement``. A sample whose engine fails continues on another one from the tokens that it has.
    """

    def __init__(
        self,
        table: EngineTable,
        *,
        seed: int,
        n: int,
        timeout: float,
        partial: bool = False,
        hang_seconds: float = 240.0,
        max_running: int = 128,
        loop: asyncio.AbstractEventLoop | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        port: int = ENGINE_PORT,
        watch: SampleWatch | None = None,
    ) -> None:
        """Create a client that draws ``n`` samples of each prompt.

        ``timeout``: seconds to wait for an engine that serves a version. ``partial``: a sample may continue
        with newer weights than it began with. ``hang_seconds``: seconds without a token after which samples
        leave an engine. ``max_running``: requests that run on an engine which reports no limit, as SGLang
        before 0.5.23. ``loop``, ``transport``, ``port``, ``watch``: for tests and rehearsals; the client
        takes the loop's time.
        """
        self._loop = loop or asyncio.new_event_loop()
        self._watch = watch or SampleWatch(self._loop.time)
        self._wishes = Wishes({})
        self._http = EngineHttp(transport or Connections(), port)
        self._dispatcher = Dispatcher(
            table,
            self._http,
            newer=partial,
            patience=timeout,
            hang_seconds=hang_seconds,
            default=RankLoad(max_running=max_running),
            problem=lambda text: self._watch.problem(text, unless_known=text.startswith("no engine")),
        )
        self._generator = Generator(
            self._dispatcher, self._http, self._watch, seed=seed, n=n, partial=partial
        )
        self._thread: threading.Thread | None = None
        if not self._loop.is_running():
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="generate")
            self._thread.start()

    @property
    def counts(self) -> Counts:
        """Numbers of tokens, retries, continued samples and refused prompts since the start."""
        return self._generator.counts

    @property
    def in_flight(self) -> int:
        """Number of requests on engines."""
        return self._dispatcher.in_flight

    @property
    def queued(self) -> int:
        """Number of samples that wait for room on an engine."""
        return self._dispatcher.queued

    @property
    def hang_seconds(self) -> float:
        """Seconds without a token after which samples leave an engine."""
        return self._dispatcher.hang_seconds

    @hang_seconds.setter
    def hang_seconds(self, seconds: float) -> None:
        self._dispatcher.hang_seconds = seconds

    def set_sampling(self, params: dict[str, Any], experts: ExpertLayers | None = None) -> None:
        """Set the parameters of all later requests.

        ``params``: see sampling.sampling_params. ``experts``: layers for which engines return the routed
        experts of each token.
        """
        self._wishes = Wishes(params, experts)

    def sampler(self, params: dict[str, Any], *, n: int, seed: int, share: float = 1.0) -> Sampler:
        """Return a client that draws ``n`` samples of each prompt with other parameters.

        Its prompts must have indices that no prompt of this client has. ``share``: of the engines that it
        uses, rounded up.
        """
        generator = Generator(
            self._dispatcher, self._http, self._watch, seed=seed, n=n, partial=False, last=True, share=share
        )
        return Sampler(self._loop, generator, Wishes(params))

    def stalled(self, limit: float) -> str:
        """Return why no token of an awaited sample arrived for ``limit`` seconds; "" if one did."""
        return self._watch.stalled(limit)

    def submit(self, prompt: Prompt, version: int, arrived: Arrived | None = None) -> "Future[list[Sample]]":
        """Start to generate a prompt's samples; prompts that were submitted earlier come first.

        ``arrived``: called in the client's thread with each sample as soon as it is complete, before the
        result is; it must not block. All tokens come from ``version``; in ``partial`` mode they may also come
        from later versions.

        The result raises PromptRefusedError when engines refuse the prompt or fail at it, TimeoutError when
        no engine serves the version for ``timeout`` seconds, UnfitEngineError when an engine lacks a feature
        of the job. Cancel it to end the requests. After a TimeoutError the same call continues the samples
        from the tokens that they have.
        """
        return asyncio.run_coroutine_threadsafe(
            self._generator.group(prompt, version, self._wishes, arrived), self._loop
        )

    def generate(
        self, prompts: Sequence[Prompt], version: int, cancelled: threading.Event | None = None
    ) -> list[Sample]:
        """Return ``n`` samples of each prompt, in the prompts' order; errors as for ``submit``.

        Raises CancelledError when ``cancelled`` is set before the end.
        """
        groups = [self.submit(prompt, version) for prompt in prompts]
        try:
            left: set[Future[list[Sample]]] = set(groups)
            while left:
                done, left = wait(left, _CANCEL_SECONDS, FIRST_EXCEPTION)
                for group in done:
                    group.result()
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError
        finally:
            for group in groups:
                group.cancel()
        return [sample for group in groups for sample in group.result()]

    def forget(self) -> None:
        """Forget the tokens of groups that no engine served, before a restart with other weights."""
        self._loop.call_soon_threadsafe(self._generator.forget)

    def close(self) -> None:
        """Cancel all requests, and end the loop's thread if the client started it."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()
