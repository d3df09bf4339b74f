"""All data of a page, read from a job's folder."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from grpo_operator.api.job_config import JobConfig
from grpo_worker.common.store_path import JobFolder
from grpo_worker.run_page.curves import MAIN, Curves
from grpo_worker.run_page.faults import Faults
from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.phases import Phases
from grpo_worker.run_page.records import (
    kept_checkpoint,
    recoveries,
    run_record,
    step_records,
    validation_records,
)
from grpo_worker.run_page.samples import chosen_steps
from grpo_worker.run_page.token_texts import Decode
from grpo_worker.run_page.validations import validations


@dataclass(frozen=True, slots=True)
class Run:
    """A job whose page is made. ``total_steps``, ``decode``: None if they are not known."""

    name: str
    folder: JobFolder
    total_steps: int | None = None
    decode: Decode | None = None

    @classmethod
    def of(cls, config: JobConfig, decode: Decode | None = None) -> Self:
        """Return the job of a configuration."""
        folder = JobFolder.of(config.spec.checkpoint.store, config.store)
        return cls(config.store.name, folder, config.spec.total_steps, decode)


def snapshot(run: Run, limits: Limits | None = None) -> dict[str, Any]:
    """Return the data of a run's page as JSON values. Raises OSError when the store does not answer."""
    limits = limits or Limits()
    found = summary(step_records(run.folder), recoveries(run.folder), limits)
    total = run.total_steps
    return found | {
        "job": run.name,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "status": status(run_record(run.folder), found["last"]["step"], total),
        "validation": validations(validation_records(run.folder), kept_checkpoint(run.folder), limits),
        "samples": chosen_steps(run.folder.store, run.decode, limits),
    }


def summary(
    records: Iterable[dict[str, Any]], restarts: Iterable[dict[str, Any]], limits: Limits,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return curves, phases and faults of steps, as far as they are drawn (pure).

    ``restarts``: lines of ``recoveries.jsonl``. ``before``: record of the step before; None: there is none.
    """
    curves, phases, faults = Curves(limits), Phases(limits), Faults(limits, before or {})
    steps, last = 0, before or {"step": 0}
    for record in records:
        steps, last = steps + 1, record
        for part in (curves, phases, faults):
            part.add(record["step"], record)
    for line in restarts:
        faults.add_recovery(line)
    return {
        "steps": steps,
        "last": {"step": last["step"], "time": last.get("wall_time", 0.0)},
        "series": (series := curves.series()),
        "main": sum(one["name"] in MAIN for one in series),
        "width": curves.width,
        "hidden": curves.hidden,
        "phases": phases.rows(),
        "faults": faults.kinds(),
    }


def status(record: dict[str, Any], step: int, total: int | None) -> dict[str, Any]:
    """Return what a job's record says of its state (pure)."""
    failed = record.get("failed", "")
    done = total is not None and step >= total
    return {
        "phase": "Failed" if failed else "Succeeded" if done else "Not ended",
        "message": failed,
        "step": step,
        "total": total,
        "attempt": record.get("attempt", 0),
        "restarts": record.get("job_restarts", 0) + record.get("infrastructure_restarts", 0),
    }
