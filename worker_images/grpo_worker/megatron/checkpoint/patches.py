"""Patches of Megatron-Core's checkpoints for Ray actors without Transformer Engine or Apex."""

import functools
import inspect
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat

from grpo_worker.checkpointing.object_files import upload
from grpo_worker.checkpointing.state_writes import write_file
from grpo_worker.megatron.checkpoint.host_pool import POOL
from grpo_worker.megatron.versions import found
from grpo_worker.profiling.progress import BACKGROUND, PROGRESS, WRITTEN

_SYNC_BYTES = 2**28  # written bytes after which a file is synchronized


def write_in_threads(module: Any) -> None:
    """Write checkpoints from a copy, with threads instead of forked processes.

    A Ray actor runs many threads, and a fork of it can inherit a held lock; the stock results queue spawns a
    manager process (5-9 s at the first save). The state must be copied even where ``tensor.to("cpu")``
    makes no copy, because training overwrites it during the write.
    """
    writer = module.FileSystemWriterAsync
    assert hasattr(writer, "preload_tensors"), "megatron-core has no FileSystemWriterAsync.preload_tensors"
    several = found(writer, "write_preloaded_data_multiproc", "write_preloaded_data_multithread")

    def preload(buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        copied = [
            (path, key, (raw, [(item, _copied(t)) for item, t in tensors]))
            for path, key, (raw, tensors) in buckets
        ]
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def write(transforms: Any, _msc: bool, _rank: int, buckets: list[Any], results: Any) -> None:
        done: queue.Queue[Any] = queue.Queue()
        threads = [
            threading.Thread(target=write_bucket, args=(transforms, index, bucket, done))
            for index, bucket in enumerate(buckets)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        written = dict(done.get_nowait() for _ in range(done.qsize()))
        if len(written) < len(buckets):
            written[-1] = RuntimeError("a thread died while it wrote the checkpoint")
        errors = [value for value in written.values() if isinstance(value, Exception)]
        results.put(errors[0] if errors else written)

    def write_bucket(transforms: Any, index: int, bucket: Any, done: Any) -> None:
        file, pieces = bucket[0], _pieces(module, transforms, bucket)
        try:
            results = write_file(Path(file), pieces) if isinstance(file, str) else upload(file, pieces)
            done.put((index, results))
        except Exception as error:  # noqa: BLE001 - all ranks get it
            done.put((index, error))

    setattr(module, found(module, "_get_write_results_queue", "get_write_results_queue"), queue.Queue)
    writer.preload_tensors = staticmethod(preload)
    setattr(writer, several, staticmethod(write))


def _pieces(module: Any, transforms: Any, bucket: Any) -> list[Callable[[Any], Any]]:
    """Return functions that write the items of a bucket to a stream."""
    _, key, (raw, tensors) = bucket
    more = {}
    if "serialization_format" in inspect.signature(module._write_item).parameters:
        more["serialization_format"] = SerializationFormat.TORCH_SAVE

    def piece(item: Any, data: Any) -> Callable[[Any], Any]:
        return lambda stream: module._write_item(*transforms, stream, data, item, key, **more)

    return [piece(item, data) for item, data in (*raw, *tensors)]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if _is_private(tensor):
        return tensor.detach()
    PROGRESS.add("bytes copied", tensor.nbytes)
    return POOL.copy(tensor)


def _is_private(tensor: torch.Tensor) -> bool:
    """Return whether nothing but the checkpoint holds the tensor's memory.

    Beside a GPU the training state in host memory is that which is offloaded, and it is pinned; what
    Megatron-Core has copied is not.
    """
    if tensor in POOL:
        return True
    return torch.cuda.is_available() and tensor.device.type == "cpu" and not tensor.is_pinned()


def share_storages(module: Any) -> None:
    """Let the writer take parts of the pool's tensors without a copy of them."""
    planner = module.MCoreSavePlanner
    original = planner.resolve_data

    def resolve(self: Any, item: Any) -> Any:
        data = original(self, item)
        return POOL.exact(data) if torch.is_tensor(data) else data

    planner.resolve_data = resolve


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
        if before // _SYNC_BYTES != after // _SYNC_BYTES and hasattr(stream, "fileno"):
            stream.flush()
            os.fdatasync(stream.fileno())
        BACKGROUND.add(WRITTEN, after - before)
        return result

    module._write_item = write_item
