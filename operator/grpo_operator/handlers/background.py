"""Background tasks: errors are logged, counted and answered by another try after a growing pause."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import NoReturn

from kubernetes.client import ApiException
from prometheus_client import Counter
from urllib3.exceptions import HTTPError

log = logging.getLogger(__name__)
ERRORS = Counter("grpo_background_errors_total", "Errors of the operator's background tasks", ["task"])
HEALTHY_SECONDS = 300.0  # a task that ran so long before it failed begins with the shortest pause again
_FIRST, _LONGEST = 1.0, 30.0  # seconds


class Pauses:
    """Pauses between tries: they double from 1 to 30 seconds and never end. Each iteration starts again."""

    def __iter__(self) -> Iterator[float]:
        """Yield the pauses in seconds."""
        pause = _FIRST
        while True:
            yield pause
            pause = min(2 * pause, _LONGEST)


async def succeeds(task: str, call: Callable[[], Awaitable[None]]) -> bool:
    """Run the call; return False, for a later try, when it fails. Raises MemoryError: no try heals that."""
    try:
        await call()
    except MemoryError:
        raise
    except (ApiException, HTTPError) as error:
        log.warning("%s failed: %s", task, error)
    except Exception:  # one bad answer or object must not end the operator
        log.exception("%s failed", task)
    else:
        return True
    ERRORS.labels(task).inc()
    return False


async def until_success(task: str, call: Callable[[], Awaitable[None]]) -> None:
    """Run the call until it succeeds, with growing pauses."""
    pauses = iter(Pauses())
    while not await succeeds(task, call):  # noqa: ASYNC110 - retries, does not poll
        await asyncio.sleep(next(pauses))


async def keep_running(task: str, run: Callable[[], Awaitable[None]]) -> NoReturn:
    """Run a task that never ends by itself; start it again, with growing pauses, when it does."""
    now, pauses = asyncio.get_running_loop().time, iter(Pauses())
    while True:
        started = now()
        if await succeeds(task, run):
            log.error("%s ended by itself", task)
            ERRORS.labels(task).inc()
        if now() - started > HEALTHY_SECONDS:
            pauses = iter(Pauses())
        await asyncio.sleep(next(pauses))
