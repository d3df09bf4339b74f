"""Trainer rank that sends versions of drawn weights to one engine rank over gloo, as a process of its own.

It reads its settings from stdin as JSON, and sends a version after each further line. It prints the port of
its store, and finally its errors as JSON.
"""

import json
import sys
from typing import Any

import torch

from grpo_operator.api.weight_path import Backend
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.protocol.direct_load import LINK
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, transfer_plan_of
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan
from grpo_worker.weightsync.trainer.endpoint import TrainerEndpoint

NAME = f"{LINK}1-drafts"
_BUCKET = 64 << 10  # bytes; so small that a version has many


def parts_of(hf: dict[str, Any], version: int, mtp: bool) -> list[Part]:
    """Return the whole tensors of a version, with or without those of the layer that drafts."""
    generator = torch.Generator().manual_seed(version)
    family = family_of(hf)
    shapes = family.shapes(hf) | (family.mtp_shapes(hf) if mtp else {})
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float32) for name, shape in shapes.items()
    }
    return [
        (name, tuple(tensor.shape), 0, 0, tensor if name.endswith("correction_bias") else tensor.bfloat16())
        for name, tensor in drawn.items()
    ]


def endpoint() -> TrainerEndpoint:
    return TrainerEndpoint(0, 1, torch.device("cpu"), lambda own: [own])


def plan_of(hf: dict[str, Any], fp8: bool, mtp: bool) -> TransferPlan:
    """Return the plan of the rank's versions."""
    return transfer_plan_of([endpoint().layout(parts_of(hf, 0, mtp), fp8)], _BUCKET)


def send(hf: dict[str, Any], fp8: bool, mtp: bool, versions: int) -> list[str]:
    """Send versions 1 to ``versions``; return the errors."""
    end = endpoint()
    end.exchange_layouts(parts_of(hf, 0, mtp), fp8)
    plan_id = end.plan(_BUCKET, fp8).plan_id
    ports = end.listen(NAME)
    print(ports[0], flush=True)
    offer = GroupOffer(NAME, "127.0.0.1", *ports, 2, 1, Backend("gloo"), plan_id, _BUCKET)
    problems = [end.open(offer)]
    for version in range(1, versions + 1):
        sys.stdin.readline()  # the engine has published the byte ranges that it needs from now on
        problems.append(end.send(parts_of(hf, version, mtp), 60, fp8))
    end.close()
    return [problem for problem in problems if problem]


if __name__ == "__main__":
    print(json.dumps(send(**json.loads(sys.stdin.readline()))))
