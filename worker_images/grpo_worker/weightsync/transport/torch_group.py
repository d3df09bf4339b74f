"""Process groups of torch.distributed whose members rendezvous at a store."""

from datetime import timedelta
from typing import Any, cast

from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world


def join(store: PrefixStore, name: str, rank: int, world: int, timeout: timedelta, backend: str) -> Any:
    """Join the process group ``name`` of ``world`` members, apart from all other groups of this process.

    An engine without this project's plugin joins by SGLang's ``init_weights_update_group``, so the prefix of
    the store and the name of the group must agree with SGLang's.
    """
    group: Any
    group, _ = _new_process_group_helper(
        world, rank, [], Backend(backend), store, group_name=cast(Any, name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world)}
    return group
