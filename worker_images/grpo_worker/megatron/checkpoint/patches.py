"""Patches of Megatron-Core 0.16.1's checkpoints for Ray actors without Transformer Engine or Apex."""

import functools
import os
import queue
import threading
from typing import Any

import torch

from grpo_worker.profiling.progress import BACKGROUND, PROGRESS, READ, WRITTEN

_SYNC_BYTES = 2**28  # written bytes after which a file is synchronized


def keep_step_of_torchs_adam(module: Any) -> None:
    """Keep each parameter's ``step`` on load: torch's Adam stores it per parameter, Megatron per group."""
    cls = module.DistributedOptimizer
    original = cls._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    cls._set_main_param_and_optimizer_states = set_states


def write_in_threads(module: Any) -> None:
    """Write checkpoints from a copy, with threads instead of forked processes.

    A Ray actor runs many threads, and a fork of it can inherit a held lock; the stock results queue spawns a
    manager process (5-9 s at the first save). The state must be copied even where ``tensor.to("cpu")``
    makes no copy, because training overwrites it during the write.
    """
    writer = module.FileSystemWriterAsync
    for name in ("preload_tensors", "write_preloaded_data_multiproc", "write_preloaded_data"):
        assert hasattr(writer, name), f"megatron-core has no FileSystemWriterAsync.{name} any more"

    def preload(buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        return [
            (path, key, (raw, [(item, _copied(t)) for item, t in tensors]))
            for path, key, (raw, tensors) in buckets
        ]

    def write(transforms: Any, _msc: bool, _rank: int, buckets: list[Any], results: Any) -> None:
        done: queue.Queue[Any] = queue.Queue()
        slots: queue.Queue[Any] = queue.Queue()
        threads = []
        for index, bucket in enumerate(buckets):
            slots.put(index)
            args = (transforms, index, bucket, done, slots, True)
            threads.append(threading.Thread(target=writer.write_preloaded_data, args=args))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        written = dict(done.get_nowait() for _ in range(done.qsize()))
        if len(written) < len(buckets):
            written[-1] = RuntimeError("a thread died while it wrote the checkpoint")
        errors = [value for value in written.values() if isinstance(value, Exception)]
        results.put(errors[0] if errors else written)

    module._get_write_results_queue = queue.Queue
    writer.preload_tensors = staticmethod(preload)
    writer.write_preloaded_data_multiproc = staticmethod(write)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().to("cpu", copy=True)
    PROGRESS.add("bytes copied", copy.nbytes)
    return copy


def count_writes(module: Any) -> None:
    """Count the bytes that writers of checkpoints have written.

    Files are synchronized every now and then: the store then takes the bytes at its own speed while they are
    counted, instead of all of them in one call at the end, which looks like a hang.
    """
    original = module._write_item

    @functools.wraps(original)
    def write_item(transforms: Any, stream: Any, *args: Any, **kwargs: Any) -> Any:
        before = stream.tell()
        result = original(transforms, stream, *args, **kwargs)
        after = stream.tell()
        if before // _SYNC_BYTES != after // _SYNC_BYTES:
            stream.flush()
            os.fdatasync(stream.fileno())
        BACKGROUND.add(WRITTEN, after - before)
        return result

    module._write_item = write_item


def count_reads(reader: Any) -> None:
    """Count the bytes that a reader of checkpoints (torch's FileSystemReader) reads."""
    original = reader._slice_file

    def slice_file(self: Any, file: Any, info: Any) -> Any:
        PROGRESS.add(READ, info.length)
        return original(self, file, info)

    reader._slice_file = slice_file
