"""Functions that run on ranks: versions of weights, published and exported."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_operator.api.weight_path import Backend
from grpo_worker.megatron.export.exporter import export
from grpo_worker.model_files.config import model_config
from grpo_worker.weightsync.protocol.direct_load import LINK
from grpo_worker.weightsync.protocol.group_offer import GroupOffer
from grpo_worker.weightsync.trainer.endpoint import TrainerEndpoint
from grpo_worker.weightsync.trainer.publisher import publish
from support.ranks.policy_cases import make, train


def publish_versions(root: str, layout: dict[str, int], versions: int) -> None:
    """Train, publish and export as a Hugging Face directory, ``versions`` times."""
    policy = make(layout)
    for version in range(1, versions + 1):
        train(policy, range(version, version + 1))
        parts = [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in policy.shards()]
        folder = Path(root) / f"update-{version}"
        publish(folder, version, dist.get_rank(), dist.get_world_size(), parts)
        hf = model_config("preset:tiny-moe")
        export(Path(root) / f"hf-{version}", hf, policy.chunks, policy.family)


def send_versions(
    root: str,
    layout: dict[str, int],
    versions: int,
    bucket: int,
    patience: float = 30,
    dies_at: int = 0,
    flips_at: int = 0,
    backend: str = "gloo",
) -> list[str]:
    """Train, export and transfer directly to one engine, ``versions`` times.

    The group offer is in ``root``/offer; version N is ready once ``root``/ready-N exists. Rank 1 kills
    itself instead of sending version ``dies_at``, and a bit of its version ``flips_at`` flips on the way.
    Returns the error of each version, or an empty text.
    """
    policy, rank, world = make(layout), dist.get_rank(), dist.get_world_size()
    end = TrainerEndpoint(rank, world, torch.device("cpu"))

    def parts() -> list[Any]:
        return [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in policy.shards()]

    end.exchange_layouts(parts(), False)
    plan_id = end.plan(bucket, False).plan_id
    name = f"{LINK}{world}-test{os.path.basename(root)[-8:]}"
    place = [("127.0.0.1", *end.listen(name)) if rank == 0 else None]
    dist.broadcast_object_list(place)
    assert place[0] is not None
    offer = GroupOffer(name, *place[0], world + 1, world, Backend(backend), plan_id, bucket)
    if rank == 0:
        _put(Path(root) / "offer", json.dumps(offer.to_json()))
    errors = [end.open(offer)]
    for version in range(1, versions + 1):
        train(policy, range(version, version + 1))
        export(Path(root) / f"hf-{version}", model_config("preset:tiny-moe"), policy.chunks, policy.family)
        dist.barrier()
        if rank == 0:
            _put(Path(root) / f"ready-{version}", "")
        if version == dies_at and rank == 1:
            time.sleep(1)  # the engine waits by now
            os.kill(os.getpid(), signal.SIGKILL)
        if version == flips_at and rank == 1:
            _flip_one(end)
        errors.append(end.send(parts(), patience, False))
        publish(Path(root), version, rank, world, parts())
    if not dies_at:
        dist.barrier()  # rank 0 takes the store with it, at which the other may still be looking
    end.close()
    return errors


def _put(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(file)


def _flip_one(end: TrainerEndpoint) -> None:
    """Flip a bit of the next message after its fingerprint was computed."""
    assert end._group is not None
    original = end._group.send

    def send(pairs: Any, deadline: float) -> Any:
        end._group.send = original  # type: ignore[method-assign, union-attr]
        pairs[0][0][len(pairs[0][0]) // 2] ^= 1
        return original(pairs, deadline)

    end._group.send = send  # type: ignore[method-assign]
