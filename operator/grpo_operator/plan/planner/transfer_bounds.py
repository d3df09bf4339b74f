"""Sizes and lower bounds in time of weight sync and checkpoints (pure)."""

from dataclasses import dataclass

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.stages import stage_layers


@dataclass(frozen=True, slots=True)
class SyncBound:
    """Bytes of one version, bytes received by all engines together, and a lower bound in seconds."""

    version_bytes: int
    received_bytes: int
    seconds: float


def checkpoint_bytes(model: ModelShape) -> int:
    """Return the bytes of a checkpoint: bf16 weights, and fp32 main weights and two moments."""
    return parameters.total(model).total * (2 + 12)


def sync_bound(
    model: ModelShape, layout: Layout, engine: EngineShape, engines: int, network: float, gpus_per_node: int
) -> SyncBound:
    """Return a lower bound of a sync in which each node receives one copy and distributes it over NVLink.

    It is the largest of three times: sending every byte once from the trainers, receiving at one node, and
    sending from one pipeline stage. ``network``: bytes/s of one GPU's network interface.
    """
    total = parameters.total(model)
    share = parameters.model_bytes(model, engine.fp8) / parameters.model_bytes(model)
    expert, dense = total.expert * 2 * share, (total.total - total.expert) * 2 * share
    node = min(gpus_per_node, engine.tensor)
    nodes = engines * engine.tensor // node
    leave = (expert + dense) / (layout.world * network)
    intake = (expert / engine.tensor + dense / node) / network
    per_stage = layout.world // layout.pipeline
    output = 0.0
    for layers in stage_layers(model.layers, layout):
        count = sum((parameters.layer(model, index) for index in layers), parameters.Count())
        sent = engines * count.expert + nodes * (count.total - count.expert)
        output = max(output, 2 * share * sent / (per_stage * network))
    received = int(engines * expert + nodes * dense)
    return SyncBound(parameters.model_bytes(model, engine.fp8), received, max(leave, intake, output))
