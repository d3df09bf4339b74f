"""Process groups of torch.distributed whose members rendezvous at a store."""

import os
from datetime import timedelta
from typing import Any, cast

from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

# A process group reads these when it is created. By default NCCL's watchdog ends the process a minute after a
# member of one of its groups has died, and tells all processes of the default group to end: one engine that
# dies in an update would end the training gang.
_SURVIVES_MEMBERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def join(store: PrefixStore, name: str, rank: int, world: int, timeout: timedelta, backend: str) -> Any:
    """Join the process group ``name`` of ``world`` members, apart from all other groups of this process.

    The process survives the death of other members; whoever uses the group notices it. This holds for all
    groups that the process creates later, so it creates those of training before.

    An engine without this project's plugin joins by SGLang's ``init_weights_update_group``, so the prefix of
    the store and the name of the group must agree with SGLang's.
    """
    os.environ |= _SURVIVES_MEMBERS
    group: Any
    group, _ = _new_process_group_helper(
        world, rank, [], Backend(backend), store, group_name=cast(Any, name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world)}
    return group
