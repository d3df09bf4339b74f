"""Bounds of a page, which hold for a job of any size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what a page holds.

    ``buckets``: intervals of steps, each with two points of every curve. ``metrics``: curves. ``marks``: of
    each kind of fault. ``validations``: intervals of steps, as ``buckets`` are, of at most ``sets`` sets
    with ``passes`` curves of pass@k each. ``steps``: whose samples are on a page that asks nobody for others,
    with ``groups`` of each and ``answers`` of each group. ``rows``: groups of a step in the overview.
    ``tokens``, ``characters``: of an answer, half of them its beginning and half its end.
    ``sample_bytes``: of all samples.
    """

    buckets: int = 400
    metrics: int = 120
    marks: int = 200
    validations: int = 100
    sets: int = 16
    passes: int = 12
    steps: int = 6
    groups: int = 4
    answers: int = 8
    rows: int = 512
    tokens: int = 512
    characters: int = 4096
    sample_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)}: a page needs at least 2")
