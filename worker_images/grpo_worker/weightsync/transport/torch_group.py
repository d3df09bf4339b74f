"""Becoming a member of a process group that others join by a store."""

from datetime import timedelta
from typing import Any, cast

from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world


def join(store: PrefixStore, name: str, rank: int, world: int, timeout: timedelta, backend: str) -> Any:
    """The group ``name`` of ``world`` members, apart from every other group of this process.

    An engine without our plugin joins in the same way by SGLang's own ``init_weights_update_group``, so the
    store's prefix and the group's name must agree with it.
    """
    group: Any
    group, _ = _new_process_group_helper(
        world, rank, [], Backend(backend), store, group_name=cast(Any, name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world)}
    return group
