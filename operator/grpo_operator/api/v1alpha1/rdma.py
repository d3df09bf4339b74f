"""RDMA fabric of GPU pods: devices, networks beside the pod network, or the network of the host."""

from typing import Annotated

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.rules import Rule

ResourceName = Annotated[
    str,
    Field(
        max_length=317, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
    ),
]
# Multus splits its annotation at commas and slashes, and accepts only DNS labels between them.
NetworkName = Annotated[
    str, Field(max_length=127, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]


class RdmaDevice(Model):
    """RDMA devices of one kind, provided by a device plugin."""

    resource: ResourceName = Field(description="extended resource that the device plugin advertises")
    count: int = Field(1, ge=1, le=64, description="number of devices per pod")


_RULES: tuple[Rule["RdmaSpec"], ...] = (
    Rule(
        "(has(self.devices) && size(self.devices) > 0) || self.hostNetwork",
        "set devices, as in {resource: rdma/hca_shared_devices_a}, or hostNetwork: without both no pod"
        " reaches the fabric",
        lambda rdma: bool(rdma.devices) or rdma.host_network,
    ),
    Rule(
        "!self.hostNetwork || !has(self.networks) || size(self.networks) == 0",
        "hostNetwork excludes networks, which attach to a pod's own network: remove one of the two",
        lambda rdma: not (rdma.host_network and rdma.networks),
    ),
    Rule(
        "!has(self.devices)"
        " || self.devices.all(device, self.devices.exists_one(other, other.resource == device.resource))",
        "devices must name each resource once: add up the counts",
        lambda rdma: len({device.resource for device in rdma.devices}) == len(rdma.devices),
    ),
    Rule(
        "!has(self.devices) || !self.devices.exists(device, device.resource == 'nvidia.com/gpu')",
        "devices must not name nvidia.com/gpu: gpusPerNode asks for GPUs",
        lambda rdma: all(device.resource != "nvidia.com/gpu" for device in rdma.devices),
    ),
)


class RdmaSpec(Model):
    """Way of GPU pods to the RDMA fabric."""

    rules = _RULES
    devices: list[RdmaDevice] = Field(
        default_factory=list, max_length=16, description="RDMA devices of each GPU pod, by resource"
    )
    networks: list[NetworkName] = Field(
        default_factory=list,
        max_length=32,
        description="networks that Multus attaches to each GPU pod, one for each rail: NAMESPACE/NAME of a "
        "NetworkAttachmentDefinition, or NAME in the job's namespace; a name that is repeated is attached "
        "several times",
    )
    host_network: bool = Field(
        False,
        description="GPU pods use the network of their host, each alone among its job's GPU pods there, "
        "because their ports are fixed; needs scheduling.networkPolicy false",
    )
