"""Routed experts of a rank's rows, fetched once a step by one rank of each pod and mapped by the others."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import httpx
import numpy as np

from grpo_worker.common import tls
from grpo_worker.common.auth import pair_headers
from grpo_worker.data.expert_folder import MISSING
from grpo_worker.data.routed_experts import ExpertsError, RoutedExperts, SpansOf, read_ranges, record_of
from grpo_worker.profiling.progress import BACKGROUND, PROGRESS

_AT_ONCE = 32  # samples of one request, which has no more than _REQUEST bytes
_REQUEST = 32 << 20
_THREADS = 4
_STALLED = 60.0  # seconds without a byte, after which an engine's pod is given up
Found = tuple[RoutedExperts, np.ndarray | None]  # None: the experts are lost


def fetch(references: Sequence[RoutedExperts], layers: Sequence[int], spans: SpansOf) -> Iterator[Found]:
    """Yield each reference with its experts [layers, tokens, k], or None if they do not exist any more.

    ``layers``, ``spans``: what the rank needs; other tokens are 0. Damaged experts count as lost.
    """
    parts = _requests(references, layers, spans)
    client = httpx.Client(timeout=_STALLED, verify=tls.pair())
    with client as http, ThreadPoolExecutor(_THREADS) as threads:

        def read(part: list[RoutedExperts]) -> list[Found]:
            records = _from_file(part, layers, spans) if part[0].in_file else _over(http, part, layers, spans)
            return [(r, _parsed(r, data, layers, spans)) for r, data in zip(part, records, strict=True)]

        waiting: deque[Future[list[Found]]] = deque()
        for part in parts:
            waiting.append(threads.submit(read, part))
            if len(waiting) > _THREADS:  # so that no more are read than the caller takes
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def _requests(
    references: Sequence[RoutedExperts], layers: Sequence[int], spans: SpansOf
) -> Iterator[list[RoutedExperts]]:
    """Yield the references of one request after the other, each to one location, in turn to all of them."""
    by_location: dict[str, list[list[RoutedExperts]]] = {}
    sizes: dict[str, int] = {}
    for reference in references:
        location = "" if reference.in_file else reference.location
        parts, size = by_location.setdefault(location, [[]]), sizes.get(location, 0)
        own = sum(length for _, length in reference.ranges(layers, spans(reference.tokens)))
        if len(parts[-1]) == _AT_ONCE or (parts[-1] and size + own > _REQUEST):
            parts.append([])
            size = 0
        parts[-1].append(reference)
        sizes[location] = size + own
    for turn in zip_longest(*by_location.values()):
        yield from (part for part in turn if part)


def _parsed(
    reference: RoutedExperts, data: bytes | None, layers: Sequence[int], spans: SpansOf
) -> np.ndarray | None:
    try:
        return None if data is None else reference.parse(data, layers, spans(reference.tokens))
    except ExpertsError:
        return None


def _from_file(part: list[RoutedExperts], layers: Sequence[int], spans: SpansOf) -> list[bytes | None]:
    try:
        return [read_ranges(Path(r.location), r.offset, r.ranges(layers, spans(r.tokens))) for r in part]
    except OSError:
        return [None] * len(part)


def _over(
    http: httpx.Client, part: list[RoutedExperts], layers: Sequence[int], spans: SpansOf
) -> list[bytes | None]:
    """Read from an agent; a pod that does not answer has lost all of them.

    Raises ExpertsError when the agent refuses the request: another try would be refused too.
    """
    body = {"references": [r.to_json() for r in part], "layers": list(layers)}
    body["spans"] = [list(spans(r.tokens)) for r in part]
    try:
        answer = http.post(f"{part[0].location}/v1/routed-experts/read", json=body, headers=pair_headers())
    except httpx.HTTPError:
        return [None] * len(part)
    if answer.is_client_error:
        why = f"HTTP {answer.status_code} {answer.text[:200]}"
        raise ExpertsError(f"{part[0].location} refuses to send routed experts: {why}")
    if answer.is_error:
        return [None] * len(part)
    data = answer.content
    sizes, place, records = np.frombuffer(data, np.int64, len(part)).tolist(), 8 * len(part), []
    for size in sizes:
        records.append(None if size == MISSING else data[place : place + size])
        place += max(size, 0)
    return records


class ExpertStore:
    """Experts of the rows of one step, in a file of the pod's memory volume.

    ``rows``: [expert layers of the rank, tokens, k] of each key, mapped, not copied.
    """

    def __init__(self, file: Path) -> None:
        """``file``: the same for the ranks of a pod that need the same rows, layers and tokens."""
        self._file, self._index = file, file.with_suffix(".json")
        self.rows: dict[str, np.ndarray] = {}

    def fetch(self, references: Sequence[RoutedExperts], layers: Sequence[int], spans: SpansOf) -> list[str]:
        """Replace the file by the experts of these references; return the keys of those that are lost."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)  # ranks may still map the old one
        index: dict[str, tuple[int, list[int], str]] = {}
        lost = []
        with self._file.open("wb") as file:
            for reference, experts in fetch(references, layers, spans):
                PROGRESS.add("routed experts")
                if experts is None:
                    lost.append(reference.key)
                    continue
                index[reference.key] = file.tell(), list(experts.shape), experts.dtype.str
                file.write(experts.tobytes())
        self._index.write_text(json.dumps(index))
        return lost

    def map(self) -> None:
        """Map what a rank of this pod has fetched."""
        index = json.loads(self._index.read_text())
        whole = np.memmap(self._file, np.uint8, "r") if self._file.stat().st_size else np.zeros(0, np.uint8)
        self.rows = {
            key: np.frombuffer(whole, dtype, int(np.prod(shape)), start).reshape(shape)
            for key, (start, shape, dtype) in index.items()
        }


def store_whole(references: Sequence[RoutedExperts], file: Path) -> dict[str, int]:
    """Write whole records to ``file``; return the offset of each key, without those that are lost."""
    offsets: dict[str, int] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as target:
        layers = range(max((reference.layers for reference in references), default=0))
        for reference, experts in fetch(references, layers, lambda tokens: [(0, tokens)]):
            BACKGROUND.add("routed experts")
            if experts is not None:
                offsets[reference.key] = target.tell()
                target.write(record_of(experts)[0])
    return offsets
