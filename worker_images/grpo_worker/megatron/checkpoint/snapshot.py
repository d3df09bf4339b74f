"""This rank's whole training state as plain tensors, for a copy in host memory.

Unlike a checkpoint it is cut as the ranks hold it, so it fits the same layout alone; copying it is all
that training waits for.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo_worker.megatron.checkpoint.checkpointer import Part, all_here, restore_rng, rng_state
from grpo_worker.megatron.optim.optimizer import inner_optimizers


def take(parts: Sequence[Part]) -> dict[str, Any]:
    """A copy on the host, which training may not touch."""
    with all_here(parts):
        return {"parts": [_copy(part) for part in parts], "rng": rng_state()}


@torch.no_grad()
def put(parts: Sequence[Part], state: dict[str, Any]) -> None:
    """Make the ranks what they were. Raises ValueError for a state of other parts or shapes."""
    with all_here(parts):
        _put(parts, state["parts"])
    restore_rng(state["rng"])


def _put(parts: Sequence[Part], state: Sequence[dict[str, Any]]) -> None:
    for part, saved in zip(parts, state, strict=True):
        _fill(dict(_weights(part)), saved["weights"])
        if part.trainable is None:
            continue
        optimizers = inner_optimizers(part.trainable.optimizer)
        for optimizer, kept in zip(optimizers, saved["optimizers"], strict=True):
            for group, fields in zip(optimizer.param_groups, kept["groups"], strict=True):
                group.update(fields)
            for parameter, (value, moments) in zip(_parameters(optimizer), kept["state"], strict=True):
                parameter.copy_(value)
                optimizer.state[parameter] = {
                    key: moment.to(parameter.device) if key != "step" else moment.clone()
                    for key, moment in moments.items()
                }
        part.trainable.schedule.load_state_dict(saved["schedule"])


def _copy(part: Part) -> dict[str, Any]:
    saved: dict[str, Any] = {"weights": {name: _host(tensor) for name, tensor in _weights(part)}}
    if part.trainable is None:
        return saved
    saved["optimizers"] = [
        {
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "state": [
                (_host(p), {key: _host(moment) for key, moment in optimizer.state[p].items()})
                for p in _parameters(optimizer)
            ],
        }
        for optimizer in inner_optimizers(part.trainable.optimizer)
    ]
    saved["schedule"] = dict(part.trainable.schedule.state_dict())
    return saved


def _weights(part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    for name, chunk in part.named_chunks():
        for key, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"{name}.{key}", tensor.detach()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _fill(targets: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    if targets.keys() != saved.keys():
        raise ValueError(f"a snapshot of other tensors: {sorted(targets.keys() ^ saved.keys())[:4]}")
    for name, tensor in targets.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(f"a snapshot of another shape: {name} {tuple(saved[name].shape)}")
        tensor.copy_(saved[name])
