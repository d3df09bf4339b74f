"""Part loader: writes what this rank keeps of a staged version into the engine's models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.weightsync.planner.boxes import tensor_of
from grpo_worker.weightsync.planner.rank_parts import BucketPart, Table, part_of, table_of
from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.sglang_plugin.loader import Report, received, timed_load
from grpo_worker.weightsync.sglang_plugin.model_writer import ExtraMemory
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, union_of
from grpo_worker.weightsync.sglang_plugin.region_loader import Placed, RegionLoader
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError, Spec, StagedReceiver


@dataclass(frozen=True, slots=True)
class _Bucket:
    """``part``: of the bucket's tensors ``specs`` that this rank keeps."""

    specs: Sequence[Spec]
    part: BucketPart

    def placed(self) -> Iterator[Placed]:
        """Yield the regions in the bytes of the part."""
        for number, bands in self.part.bands.items():
            spec = self.specs[number]
            item = spec.dtype.itemsize
            for band in bands:
                start = band.start
                for left, right in band.columns:
                    box = Box(band.top, band.bottom, left // item, right // item)
                    yield Placed(spec.name, box, start, band.pitch // item)
                    start += right - left


class PartLoader:
    """Loads versions with the tensors ``buckets`` into ``models``, of which ``recipes`` were recorded.

    ``table``: regions that this rank keeps of them, for the agent.
    """

    def __init__(
        self, models: Sequence[Any], recipes: Sequence[Recipe], buckets: Sequence[Sequence[Spec]], device: str
    ) -> None:
        self.recipes = recipes
        kept = union_of([recipe.kept() for recipe in recipes])
        self._kept = frozenset(kept)
        self._complete = False  # whether a version has been loaded
        self.table: Table = table_of([spec.name for bucket in buckets for spec in bucket], kept)
        self._device = device
        self._loaders = [RegionLoader(*pair) for pair in zip(models, recipes, strict=True)]
        self._buckets: list[_Bucket] = []
        first = 0
        for bucket in buckets:
            tensors = [tensor_of(spec.shape, dtype_name(spec.dtype)) for spec in bucket]
            self._buckets.append(_Bucket(bucket, part_of([self.table], first, tensors)))
            first += len(bucket)

    def load(self, receiver: StagedReceiver) -> Report:
        """Receive and write the part of every bucket; raises like DirectLoader.load."""
        report = Report(loaded=set(self._kept), recorded=0 if self._complete else len(self._buckets))
        memory = ExtraMemory(self._device)
        timed_load(lambda: self._load_all(receiver, report), receiver, report, memory)
        self._complete = True
        return report

    def _load_all(self, receiver: StagedReceiver, report: Report) -> str:
        """Load the parts; return the first error, or an empty text."""
        problem = ""
        try:
            for loader in self._loaders:
                loader.start()
        except DirectLoadError as error:
            problem = str(error)
        sizes = [bucket.part.nbytes for bucket in self._buckets]
        for index, flat in received(sizes, receiver, report, self._device):
            try:
                if not problem:
                    self._write(index, flat, report)
            except Exception as error:  # noqa: BLE001 - the remaining buckets must be received all the same
                problem = f"bucket {index}: {type(error).__name__}: {error}"
        del flat  # free the buckets: processing after the load may need as much memory
        if problem:
            return problem
        try:
            for loader in self._loaders:
                loader.finish()
        except Exception as error:  # noqa: BLE001 - the error goes back to the agent
            return f"after loading: {type(error).__name__}: {error}"
        return ""

    def _write(self, index: int, flat: torch.Tensor, report: Report) -> None:
        for loader in self._loaders:
            report.copies += loader.write(index, self._buckets[index].placed, flat)
