"""Record of what stand-in ranks did, for the report."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Save:
    """One checkpoint.

    ``begin``, ``copied``: when its call begins and ends. ``written``: when all bytes are in the store.
    ``nbytes``: of all ranks. ``committed``: when the ranks have marked it as complete; None: not yet.
    """

    step: int
    begin: float
    copied: float
    written: float
    nbytes: int
    committed: float | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Time without progress in a call. ``allowance``, ``assumed``: see Work."""

    seconds: float
    allowance: float
    assumed: bool


@dataclass(slots=True)
class PoolRecord:
    """Record of the ranks.

    ``rounds``: (method, begin, end). ``nbytes``: by link. ``gaps``: longest time without progress by method.
    ``routed_experts``: their bytes that passed the controller. ``stuck_since``: begin of the first standstill
    in a call. ``saves``: checkpoints.
    """

    rounds: list[tuple[str, float, float]] = field(default_factory=list)
    nbytes: Counter[str] = field(default_factory=Counter)
    gaps: dict[str, Gap] = field(default_factory=dict)
    routed_experts: int = 0
    stuck_since: float | None = None
    saves: list[Save] = field(default_factory=list)
