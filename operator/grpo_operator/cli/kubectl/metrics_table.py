"""Metrics of steps as a table (pure)."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

_DEFAULT = (
    *("critic/score/mean", "actor/loss", "actor/entropy", "response_length/mean"),
    *("timing_s/step", "perf/throughput"),
)


def metrics_table(steps: Sequence[dict[str, Any]], names: Iterable[str]) -> Table:
    """Return a row for each step. ``names``: parts of names; without any, the metrics that matter most."""
    wanted = list(names)
    known = sorted({name for step in steps for name, value in step.items() if isinstance(value, int | float)})
    columns = [n for n in known if any(part in n for part in wanted)] if wanted else list(_DEFAULT)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for name in ("step", *(name for name in columns if name in known and name != "step")):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(*(_text(step.get(str(column.header))) for column in table.columns))
    return table


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}"
