"""Cluster-wide settings of the operator, set by the Helm chart."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_operator.api.keys import OVERLAP_SECONDS
from grpo_operator.api.v1alpha1.status import PARKED, KeyScope, Phase, SettledImages


@dataclass(frozen=True, slots=True)
class GpuHealthSettings:
    """Treatment of sick GPUs.

    ``node_conditions`` and ``taints``: whether the operator may write them. ``window_hours``: in which two
    strikes put a node in quarantine. ``max_nodes_percent``: of the nodes of a job, and of the cluster, that
    may have strikes.
    """

    enabled: bool = True
    node_conditions: bool = False
    taints: bool = False
    window_hours: float = 24
    max_nodes_percent: float = 10


# Seconds after which an alert is raised for a job that makes no progress in its phase; 0: never.
PHASE_SECONDS: Mapping[str, float] = {
    Phase.WAITING: 86400,
    Phase.PENDING: 86400,
    Phase.STARTING: 1800,
    Phase.TRAINING: 1800,
    Phase.RECOVERING: 1800,
    PARKED: 1800,
    Phase.SUSPENDING: 1800,
}


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Settings of the operator.

    ``namespace``: namespace of the operator itself. ``pod_overlay``: volumes, volumeMounts and env added to
    every pod. ``watch_namespaces``: empty means all. ``scrape_namespace``: namespace of Prometheus, which
    NetworkPolicies allow to read metrics. ``key_overlap_seconds``: within which all pods of a namespace see
    a new epoch of their keys. ``key_scope``: of the keys of pods. ``phase_seconds``: see PHASE_SECONDS.
    """

    trainer_image: str
    rollout_image: str
    image_pull_policy: str = "IfNotPresent"
    namespace: str = "grpo-system"
    pod_overlay: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    watch_namespaces: tuple[str, ...] = ()
    scrape_namespace: str | None = None
    gpu_health: GpuHealthSettings = GpuHealthSettings()
    key_overlap_seconds: float = OVERLAP_SECONDS
    key_scope: KeyScope = "owner"
    phase_seconds: Mapping[str, float] = field(default_factory=lambda: PHASE_SECONDS)

    @property
    def images(self) -> SettledImages:
        """Return the images of the pods of jobs and pools that are accepted now."""
        return SettledImages(trainer=self.trainer_image, rollout=self.rollout_image, key_scope=self.key_scope)

    def with_images(self, images: SettledImages) -> "OperatorSettings":
        """Return the settings with the images of an accepted job or pool."""
        return replace(
            self, trainer_image=images.trainer, rollout_image=images.rollout, key_scope=images.key_scope
        )


def load_settings(path: Path) -> OperatorSettings:
    """Read the settings that the chart writes as JSON. Raises KeyError with the name of a missing key."""
    data = json.loads(path.read_text())
    return OperatorSettings(
        trainer_image=data["images"]["trainer"],
        rollout_image=data["images"]["rollout"],
        image_pull_policy=data["images"].get("pullPolicy", "IfNotPresent"),
        namespace=data.get("namespace", "grpo-system"),
        pod_overlay=data.get("podOverlay") or {},
        watch_namespaces=tuple(data.get("watchNamespaces") or ()),
        scrape_namespace=data.get("scrapeNamespace") or None,
        gpu_health=_gpu_health(data.get("gpuHealth") or {}),
        key_overlap_seconds=float((data.get("keys") or {}).get("overlapSeconds", OVERLAP_SECONDS)),
        phase_seconds={**PHASE_SECONDS, **(data.get("phaseSeconds") or {})},
    )


def _gpu_health(data: dict[str, Any]) -> GpuHealthSettings:
    keys = {
        "enabled": "enabled",
        "nodeConditions": "node_conditions",
        "taints": "taints",
        "windowHours": "window_hours",
        "maxNodesPercent": "max_nodes_percent",
    }
    return GpuHealthSettings(**{field: data[key] for key, field in keys.items() if key in data})
