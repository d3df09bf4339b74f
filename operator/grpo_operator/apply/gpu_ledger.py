"""The ConfigMap in which the operator remembers strikes, one key for each node, across its restarts."""

import logging

from pydantic import ValidationError

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.plan.gpu_health.strikes import NodeRecord, Records

log = logging.getLogger(__name__)
NAME = "grpo-gpu-health"


class GpuLedger:
    """Reads and writes the records. ``namespace``: of the operator."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace

    async def read(self) -> dict[str, NodeRecord]:
        """Return the records by node. One that cannot be parsed is dropped: somebody has edited it."""
        found = await self._kube.get("api/v1", "configmaps", self._namespace, NAME)
        records: dict[str, NodeRecord] = {}
        for node, text in ((found or {}).get("data") or {}).items():
            try:
                records[node] = NodeRecord.model_validate_json(text)
            except ValidationError as error:
                log.warning("ConfigMap %s, key %s cannot be parsed: %s", NAME, node, error)
        return records

    async def write(self, records: Records) -> None:
        """Replace all records."""
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": NAME, "namespace": self._namespace},
            "data": {node: record.model_dump_json(by_alias=True) for node, record in records.items()},
        }
        await self._kube.apply("api/v1", "configmaps", manifest)
