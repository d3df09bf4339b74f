"""Comparison of the images of one gang, and of those of its engines, at the start of an attempt."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_worker.common.versions import Versions, differences
from grpo_worker.controller.training.parity import ParityError, check_configs
from grpo_worker.roles.host import RankHost

if TYPE_CHECKING:
    from grpo_worker.controller.training.gang import TrainerGang
    from grpo_worker.rollout.engine_pool import RolloutPool

log = logging.getLogger(__name__)
# Ranks share collectives, pickled arguments and checkpoints.
_OF_RANKS: Mapping[str, int | None] = {"torch": None, "nccl": None, "ray": None, "megatron_core": None}
# Both images are built from one lock, so another Ray or Megatron-Core is another release of this project,
# with other messages between trainer and engines.
_OF_A_RELEASE: Mapping[str, int | None] = {"ray": None, "megatron_core": 2}
_OF_KERNELS: Mapping[str, int | None] = {"torch": 2}
_OF_LINKS: Mapping[str, int | None] = {"nccl": None}
_OF_ENGINES: Mapping[str, int | None] = {"sglang": None}
_NAMED = 4  # engines that a warning names


def versions_of(hosts: Sequence[RankHost]) -> Versions:
    """Return the versions that all ranks have. Raises ParityError that names two pods and what differs."""
    for host in hosts[1:]:
        found = differences(hosts[0].versions, host.versions, _OF_RANKS)
        if found:
            raise ParityError(
                f"the images of {hosts[0]} and {host} have different versions: {'; '.join(found)}: set "
                "spec.image to one fixed tag, and spec.upgradeStrategy to Recreate when you change it"
            )
    return hosts[0].versions if hosts else Versions()


def check_pool(trainers: "TrainerGang", pool: "RolloutPool", version: int, nccl: bool) -> str:
    """Compare model and image of the engines that serve ``version`` with the trainers'; see check_engines."""
    check_configs(trainers.hf, pool.model_configs(version))
    return check_engines(trainers.versions, {e.name: e.versions for e in pool.table.serving(version)}, nccl)


def check_engines(trainers: Versions, engines: Mapping[str, Versions], nccl: bool) -> str:
    """Compare the trainers' image with those of the engines, by name.

    Returns a warning about versions that cost speed or precision, or "". ``nccl``: weights travel over NCCL.
    Raises ParityError for an image of another release.
    """
    for name, versions in engines.items():
        found = differences(trainers, versions, _OF_A_RELEASE)
        if found:
            raise ParityError(
                f"the image of {name} is of another release than the trainers': {'; '.join(found)} (trainers "
                "first): build Dockerfile.trainer and Dockerfile.rollout from one release, and set "
                "spec.image and rollout.template.image to them"
            )
    first, versions = next(iter(engines.items()), ("", Versions()))
    warnings = [
        *_warning("the trainers", trainers, engines, _OF_LINKS if nccl else {}, _STAGED),
        *_warning("the trainers", trainers, engines, _OF_KERNELS, _GAP),
        *_warning(first, versions, engines, _OF_ENGINES, _ONE_IMAGE),
    ]
    for warning in warnings:
        log.warning("%s", warning)
    return "; ".join(warnings)


_STAGED = "no link can form: set weightSync.transport to staged, or build both images with one NCCL"
_GAP = "their kernels may differ in precision: see algorithm.maxLogProbGap"
_ONE_IMAGE = "they may sample differently: give all engines of the pool one image"


def _warning(
    who: str, ours: Versions, engines: Mapping[str, Versions], numbers: Mapping[str, int | None], remedy: str
) -> list[str]:
    """Return at most one warning, which names the first engines that differ from ``who``, with versions."""
    differing = {n: d for n, versions in engines.items() if (d := differences(ours, versions, numbers))}
    if not differing:
        return []
    names = list(differing)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    first = "; ".join(differing[names[0]])
    return [f"{first} in the images of {who} and of {', '.join(names[:_NAMED])}{more}: {remedy}"]
