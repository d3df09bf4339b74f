"""GPU memory of a training rank's NCCL communicators (pure).

NCCL takes it beside PyTorch's allocator, for each group that a rank communicates in. The bytes are those of
one measurement on four H200s of one host (benchmarks/results/nccl_memory_gpu.json). Sends, as of pipelines
and links, groups of more than four ranks and networks have not been measured: they count as the measured case
that is nearest. An all-to-all of more ranks has buffers for more peers, so the true figure may be larger.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import ModelShape

COMMUNICATOR = 509_607_936  # of 2 or 4 ranks, all-reduce or all-gather: equal within 0.5 %
ALL_TO_ALL_OF_TWO, ALL_TO_ALL = 673_185_792, 1_415_577_600  # the latter of 4 ranks


@dataclass(frozen=True, slots=True)
class Communicator:
    """A group of ``ranks`` that a rank communicates in. ``purpose``: what for."""

    purpose: str
    ranks: int
    all_to_all: bool = False

    @property
    def bytes(self) -> int:
        if not self.all_to_all:
            return COMMUNICATOR
        return ALL_TO_ALL_OF_TWO if self.ranks == 2 else ALL_TO_ALL


def communicators(
    model: ModelShape, layout: Layout, stage: int, *, links: int = 0, mtp: bool = False
) -> list[Communicator]:
    """Return the communicators of a rank of ``stage``.

    ``links``: engines that get weights over NCCL. ``mtp``: the last stage has a multi-token-prediction layer.
    A group of one rank has none. NCCL connects a group when it is first used, so groups that Megatron-Core
    makes and no training step uses are not among them.
    """
    found = [*_of_model(model, layout, stage, mtp), *(_of_experts(layout) if model.experts else ())]
    links_to_engines = [Communicator("link to an engine", layout.world + 1)] * links
    return [each for each in found if each.ranks > 1] + links_to_engines


def nccl_bytes(model: ModelShape, layout: Layout, stage: int, *, links: int = 0, mtp: bool = False) -> int:
    """Return the bytes of all communicators of a rank of ``stage``."""
    return sum(each.bytes for each in communicators(model, layout, stage, links=links, mtp=mtp))


def _of_model(model: ModelShape, layout: Layout, stage: int, mtp: bool) -> Iterator[Communicator]:
    yield Communicator("all ranks", layout.world)
    yield Communicator("norm of the gradients", layout.world)  # a group of its own
    yield Communicator("tensor", layout.tensor)
    yield Communicator("pipeline", layout.pipeline)
    yield Communicator("context", layout.context)
    yield Communicator("data", layout.data * layout.context)
    if (model.tied or mtp) and layout.pipeline > 1 and stage in (0, layout.pipeline - 1):
        yield Communicator("embedding", 2)


def _of_experts(layout: Layout) -> Iterator[Communicator]:
    yield Communicator("tokens to experts", layout.expert, all_to_all=True)
    yield Communicator("tensor of experts", layout.expert_tensor)
    yield Communicator("tokens of each expert", layout.expert * layout.expert_tensor)
    yield Communicator("data of experts", layout.expert_data)
    yield Communicator("load of experts", layout.tensor * layout.data * layout.context)
