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
from grpo_worker.model_files.config import model_config
from grpo_worker.weightsync.protocol.direct_load import LINK
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.trainer.links import TrainerLinks
from grpo_worker.weightsync.trainer.publisher import publish
from support.ranks.exports import export
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
    holds_at: int = 0,
    backend: str = "gloo",
    engine_ranks: int = 1,
) -> list[str]:
    """Train, export and transfer directly to one engine, ``versions`` times.

    The group offer is in ``root``/offer; version N is ready once ``root``/ready-N exists. Rank 1 kills
    itself instead of sending version ``dies_at``, and a bit of its version ``flips_at`` flips on the way.
    Rank 1 sends the second wave of version ``holds_at`` when ``root``/go exists.
    Returns the error of each version, or an empty text.
    """
    policy, rank, world = make(layout), dist.get_rank(), dist.get_world_size()
    links = TrainerLinks(rank, world, torch.device("cpu"))

    def parts(shards: Any) -> list[Any]:
        return [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in shards]

    links.exchange_layouts(parts(policy.held_shards()), False)
    name = f"{LINK}{world}-test{os.path.basename(root)[-8:]}"
    place = [links.listen([name], False) if rank == 0 else None]
    dist.broadcast_object_list(place)
    assert place[0] is not None
    port, by = place[0], Backend(backend)
    offer = LinkOffer(name, "gang", "127.0.0.1", port, world, engine_ranks, 1, by, bucket, 1, False)
    if rank == 0:
        _put(Path(root) / "offer", json.dumps(offer.to_json()))
    errors = [links.open(offer)]
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
            _flip_one(links, name)
        if version == holds_at and rank == 1:
            _hold_second(links, name, Path(root))
        errors += links.send([name], parts(policy.held_shards()), patience)
        publish(Path(root), version, rank, world, parts(policy.shards()))
    if not dies_at:
        dist.barrier()  # rank 0 takes the store with it, at which the other may still be looking
    links.close([name])
    return errors


def _put(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(file)


def _flip_one(links: TrainerLinks, name: str) -> None:
    """Flip a bit of the next message after its fingerprint was computed."""
    group = links._links[name].group
    original = group.exchange

    def exchange(sends: Any, receives: Any, deadline: float) -> Any:
        group.exchange = original  # type: ignore[method-assign]
        sends[0][0][len(sends[0][0]) // 2] ^= 1
        return original(sends, receives, deadline)

    group.exchange = exchange  # type: ignore[method-assign]


def _hold_second(links: TrainerLinks, name: str, root: Path) -> None:
    """Send the first wave, and the second one when ``root``/go exists; ``root``/held is there meanwhile."""
    group = links._links[name].group
    original, sent = group.exchange, []

    def exchange(sends: Any, receives: Any, deadline: float) -> Any:
        sent.append(sends)
        if len(sent) == 2:
            _put(root / "held", "")
            while not (root / "go").exists():
                time.sleep(0.05)
            group.exchange = original  # type: ignore[method-assign]
        return original(sends, receives, deadline)

    group.exchange = exchange  # type: ignore[method-assign]
