"""Sizes and lower bounds in time of weight sync and checkpoints (pure)."""

from dataclasses import dataclass

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import stage_layers
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class SyncBound:
    """Bytes of one version, bytes received by all engines together, and a lower bound in seconds."""

    version_bytes: int
    received_bytes: int
    seconds: float


def checkpoint_bytes(model: ModelShape, mtp: bool = False) -> int:
    """Return the bytes of a checkpoint: bf16 weights, and fp32 main weights and two moments.

    ``mtp``: the multi-token-prediction layer is trained.
    """
    return parameters.total(model, mtp).total * (2 + 12)


def sync_bound(
    model: ModelShape, layout: Layout, engine: EngineShape, engines: int, network: float, gpus_per_node: int,
    mtp: bool = False,
) -> SyncBound:  # fmt: skip
    """Return a lower bound of a sync in which each node receives one copy and distributes it over NVLink.

    It is the largest of three times: sending every byte once from the trainers, receiving at one node, and
    sending from one pipeline stage. ``network``: bytes/s of one GPU's network interface. ``mtp``: versions
    have the multi-token-prediction layer, which only engines that draft receive.
    """
    total, drafts = parameters.total(model, engine.drafts), engine.drafts
    bf16 = parameters.model_bytes(model, mtp=drafts)
    share = parameters.model_bytes(model, engine.fp8, drafts) / bf16
    expert, dense = total.expert * 2 * share, (total.total - total.expert) * 2 * share
    node = min(gpus_per_node, engine.tensor)
    nodes = engines * engine.tensor // node
    leave = (expert + dense) / (layout.world * network)
    intake = (expert / engine.tensor + dense / node) / network
    per_stage = layout.world // layout.pipeline
    output = 0.0
    for stage, layers in enumerate(stage_layers(model.layers, layout)):
        draft = drafts and stage == layout.pipeline - 1
        own = parameters.mtp_layer(model) if draft else parameters.Count()
        count = sum((parameters.layer(model, index) for index in layers), own)
        sent = engines * count.expert + nodes * (count.total - count.expert)
        output = max(output, 2 * share * sent / (per_stage * network))
    received = int(engines * expert + nodes * dense)
    version = parameters.model_bytes(model, engine.fp8, mtp)
    return SyncBound(version, received, max(leave, intake, output))
