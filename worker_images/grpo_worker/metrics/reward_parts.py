"""Metrics of the named parts of rewards."""

from collections.abc import Sequence

from grpo_worker.common.reward_parts import parts_of

_MOST = 32  # of a run: each is a curve of the page and a series in Prometheus


class PartMeans:
    """Mean of each part over the samples of a step that have it.

    A function may name its parts after its data, so names that come after the first ``_MOST`` have no metric.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def of(self, scores: Sequence[float]) -> dict[str, float]:
        """Return the metrics of a step. ``scores``: of its samples."""
        values: dict[str, list[float]] = {}
        for score in scores:
            for name, value in parts_of(score).items():
                values.setdefault(name, []).append(value)
        new = sorted(values.keys() - self._names)
        self._names.update(new[: _MOST - len(self._names)])
        return {
            f"reward/{name}/mean": sum(values[name]) / len(values[name])
            for name in sorted(self._names & values.keys())
        }
