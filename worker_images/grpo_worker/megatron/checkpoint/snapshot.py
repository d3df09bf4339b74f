"""Snapshot of a rank's whole training state in host memory.

Unlike a checkpoint, a snapshot is sharded exactly as the ranks hold the state, so it fits only the same
layout. Training waits only for the copy to host memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo_worker.megatron.checkpoint.checkpointer import restore_rng, rng_state
from grpo_worker.megatron.checkpoint.part import CheckpointPart, all_on_device
from grpo_worker.megatron.optim import adam, precision_aware
from grpo_worker.megatron.optim.optimizer import inner_optimizers
from grpo_worker.profiling.progress import PROGRESS


def capture(parts: Sequence[CheckpointPart]) -> dict[str, Any]:
    """Return a copy of the state in host memory."""
    with all_on_device(parts):
        return {"parts": [_copy(part) for part in parts], "rng": rng_state()}


@torch.no_grad()
def restore(parts: Sequence[CheckpointPart], state: dict[str, Any]) -> None:
    """Restore the state that ``capture`` returned. Raises ValueError for other parts or shapes.

    All of it is copied: the tensors of a state that was read from a file keep that file in memory.
    """
    with all_on_device(parts):
        _restore(parts, state["parts"])
    rng = state["rng"]
    restore_rng(rng | {"tracker": {name: kept.clone() for name, kept in rng["tracker"].items()}})


def _restore(parts: Sequence[CheckpointPart], state: Sequence[dict[str, Any]]) -> None:
    for part, saved in zip(parts, state, strict=True):
        _fill(dict(_weights(part)), saved["weights"])
        if part.trainable is None:
            continue
        optimizers = inner_optimizers(part.trainable.optimizer)
        for optimizer, kept in zip(optimizers, saved["optimizers"], strict=True):
            adam.initialize(optimizer)
            for group, fields in zip(optimizer.param_groups, kept["groups"], strict=True):
                group.update(fields)
            for parameter, (value, moments) in zip(_parameters(optimizer), kept["state"], strict=True):
                if value is not None:
                    _set(parameter, value)
                optimizer.state[parameter] = {
                    key: _on(parameter.device if key != "step" else moment.device, moment)
                    for key, moment in moments.items()
                }
        part.trainable.restore_schedule(saved["schedule"])


def _copy(part: CheckpointPart) -> dict[str, Any]:
    saved: dict[str, Any] = {"weights": {name: _host(tensor) for name, tensor in _weights(part)}}
    if part.trainable is None:
        return saved
    saved["optimizers"] = [
        {
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "state": [
                (_main(optimizer, p), {key: _host(moment) for key, moment in optimizer.state[p].items()})
                for p in _parameters(optimizer)
            ],
        }
        for optimizer in inner_optimizers(part.trainable.optimizer)
    ]
    saved["schedule"] = dict(part.trainable.schedule.state_dict())
    return saved


def _weights(part: CheckpointPart) -> Iterator[tuple[str, torch.Tensor]]:
    for name, chunk in part.named_chunks():
        for key, tensor in (*chunk.named_parameters(), *_persistent_buffers(chunk)):
            yield f"{name}.{key}", tensor.detach()


def _persistent_buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that are part of the state.

    Modules compute the others when they need them, and their shapes may depend on the batches seen so far:
    those of YaRN's rotary embeddings grow with the longest sequence.
    """
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _main(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of main weights; None if they are in the weights and the state."""
    return None if precision_aware.is_precision_aware(optimizer) else _host(parameter)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return _on(torch.device("cpu"), tensor.detach())


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    PROGRESS.add("bytes copied", tensor.nbytes)
    return tensor.to(device, copy=True)


def _set(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.copy_(value)
    PROGRESS.add("bytes copied", tensor.nbytes)


def _fill(targets: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    if targets.keys() != saved.keys():
        raise ValueError(f"the snapshot has other tensors: {sorted(targets.keys() ^ saved.keys())[:4]}")
    for name, tensor in targets.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"the snapshot's {name} has shape {tuple(saved[name].shape)}, not {tuple(tensor.shape)}"
            )
        _set(tensor, saved[name])
