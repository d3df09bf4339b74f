"""Comparison of a disturbed run with a calm one of the same manifest and seed."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from grpo_devcluster.report import load
from support.jobs import ENDED, STEPS, Start

SAME = ("step", "actor/loss", "actor/grad_norm", "critic/score/mean", "weights")


def assert_same_steps(records: Sequence[dict[str, Any]], calm: Sequence[dict[str, Any]]) -> None:
    """Assert that losses, gradient norms, scores and weights of all steps are the same, bit for bit."""
    for mine, theirs in zip(records, calm, strict=True):
        for key in SAME:
            assert mine[key] == theirs[key], f"step {mine['step']}: {key}"


def ledger(store: Path, steps: int) -> list[dict[str, Any]]:
    """Return what the first steps were trained on, without the attempt and the engine, each sample once."""
    lines = [json.loads(line) for line in (store / "ledger.jsonl").read_text().splitlines()]
    entries = [entry for entry in lines if entry["step"] <= steps]
    assert max(Counter(entry["uid"] for entry in entries).values()) == 1
    kept = [{k: v for k, v in entry.items() if k not in ("attempt", "engine")} for entry in entries]
    return sorted(kept, key=lambda entry: str(entry["uid"]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the first steps of a run. ``records``: their metrics. ``samples``: see ``ledger``."""

    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @classmethod
    def of(cls, store: Path, steps: int) -> Self:
        """Read it from the job's folder."""
        records = [record for record in load(store) if record["step"] <= steps]
        return cls(records, ledger(store, max(record["step"] for record in records)))

    def first(self, steps: int) -> Self:
        """Return those of the first steps alone."""
        parts = ([one for one in whole if one["step"] <= steps] for whole in (self.records, self.samples))
        return type(self)(*parts)

    def assert_same(self, calm: Self) -> None:
        """Assert that all steps and samples are those of another run, bit for bit."""
        assert_same_steps(self.records, calm.records)
        assert self.samples == calm.samples, "other samples"


class Undisturbed:
    """A run that nobody disturbs, with as many steps as a comparison needs."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._whole = Outcome([], [])

    def first(self, steps: int) -> Outcome:
        """Return what the first steps have made; run the job if there are too few."""
        if len(self._whole.records) < steps:
            self._whole = self._run(max(steps, STEPS))
        return self._whole.first(steps)

    def _run(self, steps: int) -> Outcome:
        job = self._start("undisturbed", steps=steps)
        status = job.wait(ENDED, 1200)
        assert status["phase"] == "Succeeded", status
        outcome = Outcome.of(job.store(), steps)
        job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
        return outcome


def recoveries(store: Path) -> list[dict[str, Any]]:
    """Return the recoveries of a run, the oldest first."""
    file = store / "recoveries.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
