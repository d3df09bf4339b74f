"""Change that lets a job go on (pure)."""

from typing import Any


def resumption(job: dict[str, Any], steps: int | None, now: str, annotation: str) -> dict[str, Any]:
    """Return the change of a job that is suspended, has failed or has succeeded.

    ``steps``: the new totalSteps. ``now``: value of ``annotation``, which a failed job has not had before.
    Raises ValueError for a job that runs, and for one that has done all steps without ``steps``.
    """
    name, phase = job["metadata"]["name"], (job.get("status") or {}).get("phase")
    total, change = job["spec"]["totalSteps"], {"totalSteps": steps} if steps is not None else {}
    if phase == "Succeeded" and (steps is None or steps <= total):
        raise ValueError(f"{name} has done all of its {total} steps: give more by --steps")
    if phase == "Failed":
        return {"metadata": {"annotations": {annotation: now}}} | ({"spec": change} if change else {})
    if job["spec"].get("suspend"):
        return {"spec": {"suspend": False, **change}}
    if phase == "Succeeded":
        return {"spec": change}
    raise ValueError(f"{name} is not suspended and has not ended: its phase is {phase or 'not known yet'}")
