"""Random tensors sharded over ranks, and their transfer plan."""

import torch
from hypothesis import strategies as st

from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.protocol.buffers import dtype_of
from grpo_worker.weightsync.protocol.manifest import layout
from grpo_worker.weightsync.protocol.tiling import make_plan
from grpo_worker.weightsync.protocol.transfer_plan import Bucket, TransferPlan, make_transfer_plan
from grpo_worker.weightsync.sglang_plugin.staged_receiver import Spec, specs_of

RANKS = 3


# name -> (rows of each rank's slice, dim); a tensor of one slice belongs to one rank
cut_tensors = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=RANKS), st.integers(0, 1), st.integers(0, 2)),
    min_size=1,
    max_size=10,
)


def parts_of(cuts: dict[str, tuple[list[int], int, int]]) -> tuple[list[list[Part]], dict[str, torch.Tensor]]:
    """Return each rank's parts and the whole tensors."""
    parts: list[list[Part]] = [[] for _ in range(RANKS)]
    whole = {}
    for name, (sizes, dim, first) in cuts.items():
        shape = (sum(sizes), 4) if dim == 0 else (4, sum(sizes))
        whole[name] = torch.randn(shape)
        offset = 0
        for number, piece in enumerate(torch.split(whole[name], sizes, dim)):
            parts[(first + number) % RANKS].append((name, shape, dim, offset, piece))
            offset += piece.shape[dim]
    return parts, whole


def transfer_plan(parts: list[list[Part]], limit: int) -> TransferPlan:
    return make_transfer_plan(make_plan([layout(r, RANKS, p) for r, p in enumerate(parts)]), limit)


def specs(bucket: Bucket) -> list[Spec]:
    return specs_of((tensor.name, dtype_of(tensor.dtype), tensor.shape) for tensor in bucket)
