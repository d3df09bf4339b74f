"""Result files of benchmarks: one JSON file per benchmark, with the origin of every figure.

``figures`` maps a key to a value and ``of`` maps the same key to the commit, date and machine of its
measurement, because one file may hold figures of several runs and several machines. ``cases`` holds raw
measurements by name, with stamps like those of figures.
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_devcluster.paths import REPO

RESULTS = REPO / "benchmarks" / "results"
LOCAL_RESULTS = REPO / "build" / "results"
Stamp = dict[str, str]


def machine() -> str:
    """Return cores, memory and kernel of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}, Linux {platform.release()}"


def commit_id() -> str:
    """Return the short id of the checked-out commit, with ``-dirty`` if other files than results differ.

    The environment variable GRPO_COMMIT names the commit of a copy whose repository does not know it.
    """
    if os.environ.get("GRPO_COMMIT"):
        return os.environ["GRPO_COMMIT"]
    git = ["git", "-C", str(REPO)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    changed = subprocess.run(
        [*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"], check=False
    )
    return head.stdout.strip() + ("-dirty" if changed.returncode else "")


def stamp(where: str = "") -> Stamp:
    """Return the origin of a figure that is measured now. ``where``: the machine, by default this one."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"commit": commit_id(), "date": today, "machine": where or machine()}


def record(name: str, figures: Mapping[str, float | None], of: Stamp | None = None) -> Path:
    """Merge figures into ``benchmarks/results/NAME.json``; the other figures of the file keep their stamps.

    ``of``: the origin of figures that were measured earlier or on another machine.
    """
    return _merge(RESULTS / f"{name}.json", "figures", figures, of)


def record_from_test(name: str, figures: Mapping[str, float | None]) -> Path:
    """Merge figures that a test measured into ``build/results/NAME.json``.

    With GRPO_RECORD=1 in the environment they go to ``benchmarks/results``: only a test run that is meant as
    a measurement changes tracked files.
    """
    folder = RESULTS if os.environ.get("GRPO_RECORD") == "1" else LOCAL_RESULTS
    return _merge(folder / f"{name}.json", "figures", figures, None)


def record_cases(name: str, cases: Mapping[str, Any], of: Stamp | None = None) -> Path:
    """Merge raw measurements into ``benchmarks/results/NAME.json``, each case with its stamp."""
    return _merge(RESULTS / f"{name}.json", "cases", cases, of)


def write_raw(target: Path, of: Stamp, **content: Any) -> None:
    """Write what one run measured on another machine, with its origin; benchmarks/from_gpu.py reads it.

    content: ``figures`` and ``cases`` as in result files, and ``failed``, the names of cases that failed.
    """
    target.write_text(json.dumps({"of": of, **content}, indent=1) + "\n")


def _merge(path: Path, kind: str, new: Mapping[str, Any], of: Stamp | None) -> Path:
    before = json.loads(path.read_text()) if path.exists() else {}
    origin = of or stamp()
    merged = {name: before[name] for name in ("figures", "cases") if name in before}
    merged[kind] = dict(sorted((before.get(kind, {}) | dict(new)).items()))
    origins = dict(sorted((before.get("of", {}) | dict.fromkeys(new, origin)).items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": path.stem, **merged, "of": origins}, indent=1) + "\n")
    return path
