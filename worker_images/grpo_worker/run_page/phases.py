"""Phases of steps and idle time of the pools, of a bounded number of steps (pure)."""

from collections.abc import Mapping
from typing import Any

from grpo_worker.run_page.buckets import Buckets
from grpo_worker.run_page.limits import Limits

STEP = "timing_s/step"
# Metrics of the phases that follow each other in a step, and their names. Generation that runs beside the
# training of the step before counts as far as it is waited for.
PHASES = {
    "timing_s/gen": "generate",
    "timing_s/gen_wait": "wait for samples",
    "timing_s/reward": "reward",
    "timing_s/to_trainers": "GPUs to trainers",
    "timing_s/reward_model": "reward model",
    "timing_s/old_log_prob": "log-probabilities",
    "timing_s/ref": "reference",
    "timing_s/values": "values",
    "timing_s/adv": "advantages",
    "timing_s/update_critic": "update critic",
    "timing_s/update_actor": "update actor",
    "timing_s/to_engines": "GPUs to engines",
    "timing_s/update_weights": "weights",
    "timing_s/save_checkpoint": "checkpoint",
}
IDLE = {"timing_s/trainers_idle": "trainers", "timing_s/engines_idle": "engines"}
OTHER = "other"


def phase_seconds(record: Mapping[str, float]) -> list[float]:
    """Return the seconds of each of PHASES, and at the end those of the step that belong to none of them."""
    seconds = [float(record.get(name, 0.0)) for name in PHASES]
    return [*seconds, max(record[STEP] - sum(seconds), 0.0)]


class Phases:
    """Steps of a run with their phases: of each interval of steps the slowest one, so all are real steps."""

    def __init__(self, limits: Limits) -> None:
        self._slowest: Buckets[tuple[int, dict[str, float]]] = Buckets(limits.buckets, _slower)

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Add the record of a step; one without the duration of its step is left out."""
        if isinstance(record.get(STEP), int | float):
            kept = {name: float(record[name]) for name in (STEP, *PHASES, *IDLE) if name in record}
            self._slowest.add(step, (step, kept))

    def rows(self) -> dict[str, Any]:
        """Return the names of the phases that the run has, of the pools, and a row for each step.

        A row has the step, its seconds, the seconds of each phase, and the seconds in which each pool was
        idle; null if that is not known.
        """
        found = self._slowest.values()
        seconds = [phase_seconds(record) for _, record in found]
        used = [at for at in range(len(PHASES) + 1) if any(row[at] for row in seconds)]
        names = [*PHASES.values(), OTHER]
        return {
            "phases": [names[at] for at in used],
            "width": self._slowest.width,
            "pools": list(IDLE.values()),
            "rows": [
                [step, record[STEP], [row[at] for at in used], [record.get(name) for name in IDLE]]
                for (step, record), row in zip(found, seconds, strict=True)
            ],
        }


def _slower(
    one: tuple[int, dict[str, float]], other: tuple[int, dict[str, float]]
) -> tuple[int, dict[str, float]]:
    return max(one, other, key=lambda entry: entry[1][STEP])
