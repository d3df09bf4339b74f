"""Rules for Grafana dashboards, by the names of Grafana's own dashboard-linter where they check the same.

That linter cannot be built from the Go module proxy. Left out are its rules for other data sources than
Prometheus, and those of PromQL's syntax: e2e/test_prometheus.py has a real Prometheus answer each query.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

Dashboard = dict[str, Any]
Rule = Callable[[Dashboard], Iterator[str]]
_RANGE = re.compile(r"\b(?:rate|irate|increase)\([^\[\]]*\[([^\]]+)\]")
_COUNTER = re.compile(r"\bgrpo_\w+_total\b")
_RATED = re.compile(r"\b(?:rate|irate|increase)\(\s*grpo_\w+_total\b")
_SELECTOR = re.compile(r"\bgrpo_\w+(\{[^}]*\})?")
_SOURCE = "$datasource"


def findings(dashboard: Dashboard, rule: Rule) -> list[str]:
    """Return what a rule finds, each as ``UID PART: text``."""
    return [f"{dashboard['uid']} {text}" for text in rule(dashboard)]


def _template_datasource(dashboard: Dashboard) -> Iterator[str]:
    sources = [v for v in _variables(dashboard) if v["type"] == "datasource"]
    named = [(v["name"], v["label"], v["query"]) for v in sources]
    if named != [("datasource", "Data source", "prometheus")]:
        yield f"templating: has the data sources {named}"


def _template_job(dashboard: Dashboard) -> Iterator[str]:
    yield from _template(dashboard, "job")


def _template_instance(dashboard: Dashboard) -> Iterator[str]:
    yield from _template(dashboard, "instance")


def _template(dashboard: Dashboard, name: str) -> Iterator[str]:
    for variable in _variables(dashboard):
        if variable["name"] == name:
            if not (variable["label"] == name and variable["multi"] and variable["allValue"] == ".+"):
                yield f"variable {name}: is not labelled {name}, multiple and .+ for all"
            return
    yield f"templating: has no variable {name}"


def _template_on_time_change_reload(dashboard: Dashboard) -> Iterator[str]:
    for variable in _variables(dashboard):
        if variable["type"] == "query" and variable["refresh"] != 2:
            yield f"variable {variable['name']}: is not reloaded when the time changes"


def _template_used(dashboard: Dashboard) -> Iterator[str]:
    text = str(dashboard["panels"]) + str(dashboard["templating"])
    for variable in _variables(dashboard):
        if not re.search(rf"\${variable['name']}\b", text):
            yield f"variable {variable['name']}: is used nowhere"


def _panel_datasource(dashboard: Dashboard) -> Iterator[str]:
    for part in [*dashboard["panels"], *(v for v in _variables(dashboard) if v["type"] == "query")]:
        if part["datasource"] != {"type": "prometheus", "uid": _SOURCE}:
            yield f"{_name(part)}: has another data source than {_SOURCE}"


def _panel_title_description(dashboard: Dashboard) -> Iterator[str]:
    for panel in dashboard["panels"]:
        if not panel.get("title") or not panel.get("description"):
            yield f"{_name(panel)}: has no title or no description"


def _panel_units(dashboard: Dashboard) -> Iterator[str]:
    for panel in dashboard["panels"]:
        if panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
            yield f"{_name(panel)}: has no unit of Grafana"


def _panel_no_targets(dashboard: Dashboard) -> Iterator[str]:
    for panel in dashboard["panels"]:
        if not panel["targets"]:
            yield f"{_name(panel)}: has no query"


def _target_rate_interval(dashboard: Dashboard) -> Iterator[str]:
    for panel, query in _queries(dashboard):
        for width in _RANGE.findall(query):
            if width != "$__rate_interval":
                yield f"{_name(panel)}: takes a range of {width}"


def _target_counter_agg(dashboard: Dashboard) -> Iterator[str]:
    for panel, query in _queries(dashboard):
        if len(_COUNTER.findall(query)) != len(_RATED.findall(query)):
            yield f"{_name(panel)}: shows a counter without rate, irate or increase"


def _target_job(dashboard: Dashboard) -> Iterator[str]:
    yield from _matched(dashboard, "job")


def _target_instance(dashboard: Dashboard) -> Iterator[str]:
    yield from _matched(dashboard, "instance")


def _matched(dashboard: Dashboard, label: str) -> Iterator[str]:
    for panel, query in _queries(dashboard):
        for labels in _SELECTOR.findall(query):
            if not re.search(rf"[{{,]{label}=", labels):
                yield f"{_name(panel)}: has a selector without {label}"
                break


def _uneditable(dashboard: Dashboard) -> Iterator[str]:
    if dashboard["editable"]:
        yield "editable: is true, but the file is the source"


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    return list(dashboard["templating"]["list"])


def _queries(dashboard: Dashboard) -> Iterator[tuple[dict[str, Any], str]]:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel, target["expr"]


def _name(part: dict[str, Any]) -> str:
    return f"panel {part['title']}" if "title" in part else f"variable {part['name']}"


# Units of Grafana that suit what the operator exports.
UNITS = {"short", "none", "s", "ops", "Bps", "bytes", "percentunit", "percent"}
RULES: dict[str, Rule] = {
    "template-datasource-rule": _template_datasource,
    "template-job-rule": _template_job,
    "template-instance-rule": _template_instance,
    "template-on-time-change-reload-rule": _template_on_time_change_reload,
    "template-used": _template_used,
    "panel-datasource-rule": _panel_datasource,
    "panel-title-description-rule": _panel_title_description,
    "panel-units-rule": _panel_units,
    "panel-no-targets-rule": _panel_no_targets,
    "target-rate-interval-rule": _target_rate_interval,
    "target-counter-agg-rule": _target_counter_agg,
    "target-job-rule": _target_job,
    "target-instance-rule": _target_instance,
    "uneditable-dashboard": _uneditable,
}
