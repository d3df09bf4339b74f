"""Functions that run on ranks: peak memory of loading a shard, and what is read."""

import ctypes
import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.readers import SafetensorsWeights, SeededWeights
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.setup import ModelSetup
from support.tiny_models import tiny_model


def peak(root: str, layout: dict[str, int]) -> dict[str, int]:
    """Return bytes of this rank's weights, of the files' largest tensor, and of peak anonymous memory."""
    hf = tiny_model("qwen3") | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 32768}
    family, parallel = family_of(hf), Layout(world=dist.get_world_size(), **layout)
    shapes = family.shapes(hf)
    if dist.get_rank() == 0:
        tensors = {name: torch.full(shape, 0.5) for name, shape in shapes.items()}
        save_file(tensors, Path(root) / "model.safetensors")
        del tensors
    dist.barrier()
    initialize_parallel(parallel, 0)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _anonymous()
    with _Watch() as watch:
        chunks = build_chunks(hf, parallel)
        hf_mapping.load(chunks, family, SafetensorsWeights(Path(root)))
    own = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    whole = all(bool((p == 0.5).all()) for chunk in chunks for p in chunk.parameters())
    assert whole, "some weight was not loaded"
    largest = max(torch.Size(shape).numel() for shape in shapes.values()) * 4
    return {"own": own, "largest": largest, "taken": watch.highest - before}


def _anonymous() -> int:
    """Return bytes of anonymous memory; the files' own pages, which the kernel may drop, do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class _Counting(SeededWeights):
    """Seeded weights that count how often each box is read."""

    def __init__(self, hf: dict[str, Any], seed: int) -> None:
        super().__init__(hf, seed)
        self.read_boxes: Counter[tuple[str, int, int]] = Counter()

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        self.read_boxes[name, dim, offset] += 1
        return super().read(name, dim, offset, length)


def reads_with_reference(layout: dict[str, int]) -> dict[str, Any]:
    """Build a policy with its reference; return the most reads of a box, and whether their bits are equal."""
    hf, parallel = tiny_model("deepseek_v3"), Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, 0)
    reader = _Counting(hf, 3)
    policy = PolicyModel(ModelSetup(hf, parallel, reader), OptimizerSpec(), 10)
    pairs = zip(policy.held_shards(), hf_mapping.shards(policy.reference, policy.family), strict=True)
    equal = all(a.name == b.name and torch.equal(a.tensor, b.tensor) for a, b in pairs)
    ours, theirs = (
        {p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters()}
        for chunks in (policy.chunks, policy.reference)
    )
    apart = not ours & theirs
    return {"reads": max(reader.read_boxes.values()), "equal": equal, "apart": apart}


class _Watch:
    """Peak anonymous memory within a with block."""

    def __enter__(self) -> "_Watch":
        self.highest, self._done = _anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self.highest = max(self.highest, _anonymous())

    def __exit__(self, *_error: Any) -> None:
        self._done.set()
        self._thread.join()
        self.highest = max(self.highest, _anonymous())
