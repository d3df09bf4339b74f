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
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.trainer.links import TrainerLinks

NAME = f"{LINK}gang-drafts"
_BUCKET = 1 << 20  # bytes; so small that a version has many waves


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


def send(hf: dict[str, Any], fp8: bool, mtp: bool, versions: int) -> list[str]:
    """Send versions 1 to ``versions``; return the errors."""
    links = TrainerLinks(0, 1, torch.device("cpu"), lambda own: [own])
    links.exchange_layouts(parts_of(hf, 0, mtp), fp8)
    port = links.listen([NAME], fp8)
    print(port, flush=True)
    offer = LinkOffer(NAME, "gang", "127.0.0.1", port, 1, 1, 1, Backend.GLOO, _BUCKET, 1, fp8)
    problems = [links.open(offer)]
    if not problems[0]:
        for version in range(1, versions + 1):
            sys.stdin.readline()
            problems += links.send([NAME], parts_of(hf, version, mtp), 60)
    links.close([NAME])
    return [problem for problem in problems if problem]


if __name__ == "__main__":
    print(json.dumps(send(**json.loads(sys.stdin.readline()))))
