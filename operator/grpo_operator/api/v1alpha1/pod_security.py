"""User of a job's containers, and what they may write."""

from typing import Annotated

from pydantic import Field

from grpo_operator.api.base import Model

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SecurityContextSpec(Model):
    """User, groups and root file system of all containers, as in Kubernetes' security contexts."""

    run_as_user: Id | None = Field(
        None,
        description="uid of the processes, such as that of the store's owner; 0: root. Default: 65532. With "
        "rdma and with weightSync.transport cuda-ipc: 0, for which nodes need no preparation",
    )
    run_as_group: Id | None = Field(None, description="gid of the processes; default: as runAsUser")
    fs_group: Id | None = Field(
        None, description="group that volumes with support for it are given to; default: as runAsGroup"
    )
    supplemental_groups: list[Id] = Field(
        default_factory=list, max_length=16, description="further groups, such as those of an NFS export"
    )
    read_only_root_filesystem: bool = Field(
        True, description="false: images may write outside /tmp and the mounted volumes"
    )
