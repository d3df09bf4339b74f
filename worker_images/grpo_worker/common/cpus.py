"""Number of CPUs of this container."""

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of cgroups version 2


def available_cpus(quota: Path = _QUOTA) -> int:
    """Return the CPUs that this process may use at the same time, by its container's limit, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
        return min(allowed, max(1, math.ceil(int(limit) / int(period))))
    except (OSError, ValueError):  # "max": no limit
        return allowed
