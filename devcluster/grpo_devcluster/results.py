"""Result files under benchmarks/results: one JSON a benchmark, figures merged run by run."""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from grpo_devcluster.follow import commit_id
from grpo_devcluster.paths import REPO

RESULTS = REPO / "benchmarks" / "results"


def machine() -> str:
    """Cores, memory and kernel, which is what the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}, Linux {platform.release()}"


def record(name: str, figures: dict[str, float | int | None], elsewhere: str = "") -> Path:
    """Merge figures into ``benchmarks/results/NAME.json``. ``elsewhere``: the machine, if not this one."""
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    old, others = before.get("figures", {}), before.get("elsewhere", {})
    others = {figure: where for figure, where in others.items() if figure not in figures}
    data = {
        "name": name,
        "machine": machine(),
        "elsewhere": dict(
            sorted((others | (dict.fromkeys(figures, elsewhere) if elsewhere else {})).items())
        ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit_id(REPO),
        "figures": dict(sorted((old | figures).items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")
    return path
