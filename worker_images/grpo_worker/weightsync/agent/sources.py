"""The trainers' sidecars: URLs of the files of a version, and calls to several of them in parallel."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_PARALLEL = 8  # sources read in parallel


def each(call: Callable[[T], R], over: Iterable[T]) -> list[R]:
    """Return the results of calls made in parallel, in order."""
    with ThreadPoolExecutor(_PARALLEL) as threads:
        return list(threads.map(call, over))


def url_of(sources: Mapping[int, str], version: int, rank: int, suffix: str) -> str:
    """Return the URL of a rank's file of a version."""
    return f"{sources[rank]}/v1/weights/{version}/{rank}.{suffix}"
