"""Optimizer state in a checkpoint: each data-parallel rank saves the chunks that it mostly keeps.

The distributed optimizer cuts the parameters of a buffer into one range for each rank, regardless of where a
parameter ends. A checkpoint for any layout needs rectangular chunks of parameters. Megatron-Core gathers all
of them on every data-parallel rank, on the GPU and in host memory, and loads all of them on every rank. Here
one of the ranks with a part of a chunk receives the rest of it and saves it, and a rank loads the chunks that
it has a part of. Either reads what the other has saved.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from grpo_worker.megatron.checkpoint import rank_state
from grpo_worker.megatron.checkpoint.host_pool import POOL
from grpo_worker.megatron.checkpoint.pieces import (
    CHUNK,
    Owners,
    Piece,
    chunk_count,
    clipped,
    piece_of,
    pieces,
)
from grpo_worker.megatron.optim.offload import HostCopies
from grpo_worker.profiling.progress import PROGRESS

_KEYS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # ours, the checkpoint's
_OVER_GLOO = "distrib_optim_fully_reshardable_mem_efficient"
_COPIES = "host_copies"


def from_host(copies: HostCopies) -> dict[str, Any]:
    """Return the metadata of a checkpoint whose state is read in host memory, where it is offloaded.

    Ranks then exchange it over gloo. The files are those of any other checkpoint.
    """
    return {_OVER_GLOO: True, _COPIES: copies}


def save_own_parameters(module: Any) -> None:
    """Replace how Megatron-Core's distributed optimizer saves and loads its state."""
    optimizer = module.DistributedOptimizer
    for name, function in (
        ("sharded_param_state_fully_reshardable", _described_state),
        ("load_parameter_state_from_fully_reshardable", _load),
    ):
        assert hasattr(optimizer, name), f"megatron-core has no DistributedOptimizer.{name}"
        setattr(optimizer, name, function)


def _described_state(
    optimizer: Any,
    model_state: dict[str, Any],
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> dict[int, dict[str, Any]]:
    """Return the chunks that this rank saves or loads, by number of the parameter, kind and number."""
    fields = metadata or {}
    over_gloo, copies = fields.get(_OVER_GLOO, False), fields.get(_COPIES, HostCopies({}))
    group = optimizer.data_parallel_group_gloo if over_gloo else optimizer.data_parallel_group
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    described = {part.data: part for part in nested_values(sharded)}
    found, owners = {}, Owners()
    for number, (parameter, parts) in enumerate(_parameters(optimizer, group.size())):
        of_weights = described[parameter]
        if not is_loading and any(of_weights.replica_id[:-1]):  # another group of ranks saves it
            continue
        cut = list(_chunks(of_weights, parts, owners))
        if is_loading:
            chunks = _empty(of_weights, cut, group.rank())
        else:
            mine = piece_of(parts, group.rank())
            own = {} if mine is None else rank_state.read(optimizer, parameter, copies)
            chunks = _gathered(own, mine, of_weights, cut, group)
        if chunks[_KEYS["param"]]:
            found[number] = chunks
    return found


def _parameters(optimizer: Any, ranks: int) -> Iterator[tuple[torch.Tensor, list[Piece]]]:
    """Yield the parameters with their pieces, in the order of Megatron-Core's numbers."""
    for buffer in optimizer.buffers:
        for parameter, (start, end, bucket) in buffer.param_index_map.items():
            inside = buffer.buckets[bucket]
            yield parameter, pieces(start, end, inside.offset, inside.grad_data.numel() // ranks)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Chunk ``index`` of ``count`` of a parameter, with the pieces of it, which rank ``owner`` saves."""

    index: int
    count: int
    pieces: list[Piece]
    length: int
    owner: int


def _chunks(of_weights: Any, parts: list[Piece], owners: Owners) -> Iterator[_Chunk]:
    """Yield the chunks of a parameter. A tensor that its model cuts by itself is one chunk."""
    cut = not isinstance(of_weights, ShardedTensorFactory)
    count = chunk_count(of_weights.data.shape, CHUNK) if cut else 1
    length = parts[-1].end // count
    for index in range(count):
        within = clipped(parts, index * length, (index + 1) * length)
        yield _Chunk(index, count, within, length, owners.choose(within))


def _empty(of_weights: Any, chunks: list[_Chunk], rank: int) -> dict[str, dict[int, Any]]:
    """Return the chunks to load: those that this rank has a piece of."""
    found: dict[str, dict[int, Any]] = {name: {} for name in _KEYS.values()}
    for chunk in chunks:
        if piece_of(chunk.pieces, rank):
            for name in _KEYS.values():
                replica = 0 if chunk.owner == rank else 1 + rank
                found[name][chunk.index] = _sharded(
                    torch.empty(chunk.length), name, of_weights, chunk, replica
                )
    return found


def _gathered(
    own: dict[str, torch.Tensor], mine: Piece | None, of_weights: Any, chunks: list[_Chunk], group: Any
) -> dict[str, dict[int, Any]]:
    """Return the chunks to save, in host memory: those that this rank owns.

    ``own``: this rank's state of its piece ``mine`` of the parameter.
    """
    found: dict[str, dict[int, Any]] = {name: {} for name in _KEYS.values()}
    if mine is None:
        return found
    for chunk in chunks:
        if not piece_of(chunk.pieces, group.rank()):
            continue
        for key, name in _KEYS.items():
            saved = POOL.create(chunk.length) if chunk.owner == group.rank() else None
            for part in chunk.pieces:
                values = own[key].detach()[part.start - mine.start : part.end - mine.start]
                first = part.start - chunk.index * chunk.length
                target = None if saved is None else saved[first : first + part.end - part.start]
                _move(values, target, part, chunk.owner, group)
            if saved is not None:
                found[name][chunk.index] = _sharded(saved, name, of_weights, chunk, 0)
    return found


def _move(own: torch.Tensor, target: torch.Tensor | None, part: Piece, owner: int, group: Any) -> None:
    """Bring a piece into ``target``, which the owner has. ``own``: the values, on the rank that has them."""
    rank = group.rank()
    if rank not in (part.rank, owner):
        return
    for first in range(0, part.end - part.start, CHUNK):
        last = min(first + CHUNK, part.end - part.start)
        if part.rank == owner:
            values = own[first:last]
        elif rank == owner:
            values = torch.empty(last - first, dtype=torch.float32, device=own.device)
            _exchange(dist.irecv, values, part.rank, group)
        else:
            _exchange(dist.isend, own[first:last].float().contiguous(), owner, group)
            continue
        assert target is not None
        target[first:last].copy_(values, non_blocking=True)
        PROGRESS.add("bytes copied", values.nbytes)


def _exchange(operation: Any, values: torch.Tensor, rank: int, group: Any) -> None:
    peer = dist.get_global_rank(group, rank)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, values, peer, group)]):
        work.wait()


def _sharded(values: torch.Tensor, name: str, of_weights: Any, chunk: _Chunk, replica: int) -> Any:
    """Return a chunk, which is cut along the first axis, as a part of the checkpoint."""
    fields: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{of_weights.key}",
        "replica_id": (*of_weights.replica_id[:-1], replica),
    }
    if isinstance(of_weights, ShardedTensorFactory):
        return replace(of_weights, data=values.reshape(of_weights.data.shape), **fields)
    rows, *others = of_weights.local_shape or (1,)
    shape = (rows // chunk.count, *others) if of_weights.local_shape else ()
    axis = of_weights.prepend_axis_num
    offset, grid = list(of_weights.global_offset), list(of_weights.axis_fragmentations)
    if shape:
        offset[axis] += chunk.index * (rows // chunk.count)
        grid[axis] *= chunk.count
    return replace(
        of_weights, data=values.reshape(shape), dtype=values.dtype, local_shape=shape,
        global_offset=tuple(offset), axis_fragmentations=tuple(grid), **fields,
    )  # fmt: skip


@torch.no_grad()
def _load(optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """Copy this rank's pieces out of the loaded chunks."""
    group = optimizer.data_parallel_group
    for number, (parameter, parts) in enumerate(_parameters(optimizer, group.size())):
        mine = piece_of(parts, group.rank())
        if mine is None:
            continue
        own = rank_state.read(optimizer, parameter, HostCopies({}))
        for key, name in _KEYS.items():
            for index, chunk in state[number][name].items():
                start = index * chunk.numel()
                (part,) = clipped([mine], start, start + chunk.numel())
                own[key][part.start - mine.start : part.end - mine.start].copy_(
                    chunk.flatten()[part.start - start : part.end - start]
                )
        rank_state.write(optimizer, parameter, own)
