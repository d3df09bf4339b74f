"""Grafana's JSON model of a dashboard of time series (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time. ``legend``: Grafana's pattern of their names. ``unit``: one of Grafana's units.

    ``stacked``: whether the lines are parts of a whole.
    """

    title: str
    help: str
    query: str
    legend: str
    unit: str = "short"
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """A list to choose from above the panels. ``query``: PromQL's label_values(...)."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of panels, two in a row. ``uid``: part of its address in Grafana."""

    uid: str
    title: str
    variables: Sequence[Variable]
    panels: Sequence[Panel]

    def model(self) -> dict[str, Any]:
        """Return what Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["grpo"],
            "schemaVersion": 39,
            "version": 1,
            "editable": False,  # the file is the source
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [_DATASOURCE, *map(_variable, self.variables)]},
            "panels": [_panel(number, panel) for number, panel in enumerate(self.panels)],
        }


_DATASOURCE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
    "hide": 0,
}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": _SOURCE,
        "query": variable.query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".+",
        "multi": True,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [{"refId": "A", "expr": panel.query, "legendFormat": panel.legend}],
    }
