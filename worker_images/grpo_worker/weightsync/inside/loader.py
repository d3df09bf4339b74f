"""One version into one model: receive a bucket while the one before is written."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from grpo_worker.weightsync.inside.fingerprint import fingerprint
from grpo_worker.weightsync.inside.recipe import Recipe, homes, make_recipe
from grpo_worker.weightsync.inside.recording import record
from grpo_worker.weightsync.inside.request import DirectLoad

Named = tuple[str, torch.Tensor]


class DirectLoadError(RuntimeError):
    """The version is not in the model, or not whole; the message says why."""


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of a bucket and its place there (bytes)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(slots=True)
class _Known:
    """What is known of a bucket since it was loaded first. ``after``: the model's own work after
    loading, to be repeated each time."""

    recipe: Recipe
    after: list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(slots=True)
class Report:
    """What was done, for the agent. ``taken``: the names of which this rank holds something."""

    copies: int = 0
    by_loader: int = 0
    recorded: int = 0
    taken: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)


class DirectLoader:
    """Loads versions into ``model``: the first through its own loader, later ones by what was seen."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._known: dict[tuple[str, int], _Known] = {}
        self._taken: set[str] = set()

    def load(
        self, request: DirectLoad, buckets: Sequence[Sequence[Spec]], receive: Callable[[torch.Tensor], Work]
    ) -> Report:
        """Receive and write every bucket. ``receive``: begins to fill its argument, uint8 [bytes].

        All buckets are received also after a failure, because others wait for this rank.
        Raises DirectLoadError when the bytes are not those that were sent, or one could not be loaded.
        """
        report, found, problem = Report(), [], ""
        here = homes((*self._model.parameters(), *self._model.buffers()))
        started = time.monotonic()
        for index, flat in self._received(buckets, receive):
            found.append(fingerprint(flat))
            try:
                if not problem:
                    self._load((request.plan_id, index), here, flat, buckets[index], report)
            except Exception as error:
                problem = f"bucket {index}: {type(error).__name__}: {error}"
        report.seconds["receive_and_load"] = time.monotonic() - started
        for index, (digest, wanted) in enumerate(zip(found, request.fingerprints, strict=True)):
            if int(digest) != wanted:
                problem = problem or f"bucket {index}: its bytes are not those that were sent"
        if problem:
            self._known.clear()
            raise DirectLoadError(problem)
        report.taken = self._taken
        return report

    def _received(
        self, buckets: Sequence[Sequence[Spec]], receive: Callable[[torch.Tensor], Work]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each bucket's bytes, the next one under way. Two buffers; a device orders their reuse by itself:
        a transfer that is begun later waits for the copies that were begun before."""
        sizes = [bucket[-1].start + bucket[-1].nbytes for bucket in buckets]
        buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in sizes[:2]]
        views = [buffers[index % 2][:size] for index, size in enumerate(sizes)]
        work = receive(views[0])
        for index, view in enumerate(views):
            following = receive(views[index + 1]) if index + 1 < len(views) else None
            work.wait()
            yield index, view
            if following is not None:
                work = following

    def _load(
        self,
        key: tuple[str, int],
        here: frozenset[int],
        flat: torch.Tensor,
        bucket: Sequence[Spec],
        report: Report,
    ) -> None:
        known = self._known.get(key)
        if known is None or not known.recipe.homes <= here:
            known = self._known[key] = self._record(flat, bucket)
            report.recorded += 1
        else:
            self._repeat(known, flat, bucket)
        report.copies += len(known.recipe.steps)
        report.by_loader += len(known.recipe.by_loader)

    def _record(self, flat: torch.Tensor, bucket: Sequence[Spec]) -> _Known:
        tensors, after = [(spec.name, _view(flat, spec)) for spec in bucket], []
        original = getattr(self._model, "post_load_weights", None)

        def seen(*args: Any, **kwargs: Any) -> Any:
            after.append((args, kwargs))
            return original(*args, **kwargs) if original else None

        if original:
            self._model.post_load_weights = seen
        try:
            recording = record(self._model.load_weights, tensors)
        finally:
            if original:
                del self._model.post_load_weights
        self._taken |= recording.copies.keys() | recording.unexplained.keys()
        return _Known(make_recipe(recording, flat, _partners(bucket)), after[-1:])

    def _repeat(self, known: _Known, flat: torch.Tensor, bucket: Sequence[Spec]) -> None:
        known.recipe.repeat(flat)
        if known.recipe.by_loader:
            rest = [(spec.name, _view(flat, spec)) for spec in bucket if spec.name in known.recipe.by_loader]
            self._model.load_weights(rest)
        for args, kwargs in known.after:
            self._model.post_load_weights(*args, **kwargs)


def _view(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    return flat[spec.start : spec.start + spec.nbytes].view(spec.dtype).view(spec.shape)


def _partners(bucket: Sequence[Spec]) -> list[list[str]]:
    """Tensors of one module: a loader that fuses some needs them together."""
    groups: dict[str, list[str]] = {}
    for spec in bucket:
        groups.setdefault(spec.name.rsplit(".", 2)[0], []).append(spec.name)
    return [names for names in groups.values() if len(names) > 1]
