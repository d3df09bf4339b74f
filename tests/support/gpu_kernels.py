"""Programs that run the GPU's kernels in Triton's interpreter, which must be on before Triton is imported.

    TRITON_INTERPRET=1 python -m support.gpu_kernels NAME

Each prints what is wrong, as a JSON list.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from grpo_worker.common.device_numbers import DeviceNumbers
from grpo_worker.weightsync.planner.boxes import held_regions
from grpo_worker.weightsync.planner.engine_plan import Part, plan_engine
from grpo_worker.weightsync.planner.schedule import Wave
from grpo_worker.weightsync.protocol.buffers import aligned
from grpo_worker.weightsync.protocol.byte_copies import ByteCopies, Piece
from grpo_worker.weightsync.sglang_plugin.copy_plan import CopyPlan, Step, _piece
from grpo_worker.weightsync.sglang_plugin.recipe import record
from grpo_worker.weightsync.trainer import wave_sender
from grpo_worker.weightsync.trainer.wave_packer import KernelPacker, Shards, Target, TensorPacker
from support.random_plans import Case, EngineModel, draw

_CPU = torch.device("cpu")


def pack() -> Iterator[str]:
    """Pack random waves by kernels and by torch, also after shards have moved or have another layout."""
    for seed in range(6):
        case = draw(seed, trainers=2, engine_ranks=2)
        for rank, part in enumerate(_parts(case)):
            for number, wave in enumerate(part.waves):
                data, targets = _targets(wave, part)
                numbers = DeviceNumbers.zeros(len(targets), _CPU)
                packers = KernelPacker(targets, numbers), TensorPacker(targets)
                for version, moved in enumerate(
                    (case.parts(rank, 1), case.parts(rank, 2), _wide(case, rank))
                ):
                    packed = []
                    for packer in packers:
                        data.zero_()
                        packer.pack(Shards(moved))
                        packed.append(
                            [
                                (t.values.clone(), None if t.scales is None else t.scales.clone())
                                for t in targets
                            ]
                        )
                    if not all(map(_same, *packed)):
                        yield f"seed {seed}, rank {rank}, wave {number}, version {version}"


def _same(ours: tuple[torch.Tensor, Any], wanted: tuple[torch.Tensor, Any]) -> bool:
    """Return whether both are the same bytes; of FP8 only the scales are compared.

    The interpreter does not round to FP8 as GPUs do, where benchmarks/gpu/sync.py compares the bits.
    """
    (mine, scales), (theirs, other) = ours, wanted
    if scales is None:
        return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    return torch.equal(scales, other)


def _targets(wave: Wave, part: Part) -> tuple[torch.Tensor, list[Target]]:
    """Return the memory of a wave's messages, and what is packed into it."""
    data = torch.zeros(sum(aligned(message.nbytes) for message in wave), dtype=torch.uint8)
    targets, start = [], 0
    for message in wave:
        targets += wave_sender._targets(data[start : start + message.nbytes], message, part)
        start += aligned(message.nbytes)
    return data, targets


def _wide(case: Case, rank: int) -> list[Any]:
    """Return the shards as views of wider tensors, so that their rows are apart."""
    result = []
    for *layout, values in case.parts(rank, 3):
        wide = torch.zeros(values.shape[0], values.shape[1] + 3, dtype=values.dtype)
        wide[:, : values.shape[1]] = values
        result.append((*layout, wide[:, : values.shape[1]]))
    return result


def _parts(case: Case) -> list[Part]:
    tensors, held = held_regions([case.slices(rank) for rank in range(2)])
    kept = {rank: record(EngineModel(case, rank), case.specs()).kept() for rank in range(2)}
    return plan_engine(tensors, held, kept, lambda _: 0, 1 << 20).of_trainers(2)


def unpack() -> Iterator[str]:
    """Copy a buffer into views of parameters by kernels and by torch."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=generator)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        whole = torch.zeros(6, 40, 24, dtype=dtype)
        views = [whole[0], whole[1, 3:9], whole[2, :, 5:9], whole[3:5, :, :8], whole[5].view(-1)[7:91]]
        for number, target in enumerate(views):
            size = tuple(target.shape)
            strides = (
                torch.empty(size).stride(),
                tuple(3 * s if s > 1 else s for s in torch.empty(size).stride()),
            )
            for stride in strides:
                step = Step(target, dtype, 128 + 8 * number, size, stride)
                piece = _piece(step)
                results = []
                for copies in (_by_torch(step), ByteCopies([piece], _CPU) if piece else None):
                    whole.zero_()
                    if isinstance(copies, CopyPlan):
                        copies.replay(flat)
                    elif copies is not None:
                        copies.launch(source=flat.data_ptr())
                    results.append(whole.view(torch.uint8).clone())
                if piece is None and len(size) < 3:
                    yield f"{dtype}, view {number}: it is no piece"
                if piece is not None and not torch.equal(*results):
                    yield f"{dtype}, view {number}, stride {stride}: other bytes"


def _by_torch(step: Step) -> CopyPlan:
    return CopyPlan.of([step])


def words() -> Iterator[str]:
    """Copy rows of odd sizes at odd places."""
    source = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    for start, end, width, pitch in ((0, 0, 64, 64), (4, 12, 20, 36), (2, 6, 30, 34), (1, 3, 7, 11)):
        piece = Piece(start, end, 5, width, pitch, width + pitch)
        found, wanted = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
        for row in range(5):
            at, to = start + row * pitch, end + row * (width + pitch)
            wanted[to : to + width] = source[at : at + width]
        ByteCopies([piece], _CPU).launch(source.data_ptr(), found.data_ptr())
        if not torch.equal(found, wanted):
            yield f"{piece}: other bytes"


if __name__ == "__main__":
    print(json.dumps(list({"pack": pack, "unpack": unpack, "words": words}[sys.argv[1]]())))
