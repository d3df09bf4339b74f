"""The chart's dashboards are those of the tables, and name only metrics that exist."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.dashboards.files import files
from grpo_devcluster.dashboards.pages import DASHBOARDS
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO
from support.dashboard_rules import RULES, findings


def test_the_charts_files_are_generated() -> None:
    folder = CHART / "files" / "dashboards"
    assert {file.name: file.read_text() for file in folder.iterdir()} == files(), "run make dashboards"


def test_panels_have_an_id_and_a_place_of_their_own() -> None:
    for page in DASHBOARDS:
        panels = page.model()["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


KNOWN = set(re.findall(r"`(grpo_\w+)`", (REPO / "docs" / "reference" / "metrics.md").read_text()))
# Of GPUs only what this names is shown, as DCGM exporter has dashboards of its own.
OF_GPUS = {"grpo_gpu_health", "grpo_gpu_utilization_ratio"}
NOT_SHOWN = {  # bounds of alerts, what status or another panel shows too, and what is for a closer look
    "grpo_background_errors_total", "grpo_build_info", "grpo_job_checkpoint_interval_steps",
    "grpo_job_phase_limit_seconds", "grpo_job_spare_pods", "grpo_job_step_seconds", "grpo_job_stragglers",
    "grpo_job_total_steps", "grpo_job_weight_version", "grpo_longest_reconcile_seconds",
    "grpo_metric_maximum", "grpo_metric_minimum", "grpo_recovery_part_seconds", "grpo_rollout_refused_total",
    "grpo_rollout_retries_total", "grpo_step", "grpo_weight_nixl_reads_total",
    "grpo_weight_received_bytes_total",
}  # fmt: skip


def _named(query: str) -> set[str]:
    return {name.removesuffix("_bucket") for name in re.findall(r"\bgrpo_\w+", query)}


def test_queries_name_metrics_of_the_reference() -> None:
    for page in DASHBOARDS:
        for panel in page.panels:
            assert _named(panel.query) and _named(panel.query) <= KNOWN, panel.title


def test_every_metric_has_a_panel_or_is_listed_here() -> None:
    """A panel without data cannot just go: its metric would be missing."""
    shown = {name for page in DASHBOARDS for panel in page.panels for name in _named(panel.query)}
    of_gpus = {name for name in KNOWN if name.startswith("grpo_gpu_")}
    assert shown & of_gpus == OF_GPUS
    assert shown - of_gpus == KNOWN - of_gpus - NOT_SHOWN


EXCLUSIONS = yaml.safe_load(Path(__file__).with_name("dashboard_exclusions.yaml").read_text())
MODELS = {page.uid: page.model() for page in DASHBOARDS}


@pytest.mark.parametrize("rule", RULES)
def test_dashboards_follow_the_rules_of_grafana(rule: str) -> None:
    """The exclusions name what stays as it is; one that excludes nothing must go."""
    found = [text for model in MODELS.values() for text in findings(model, RULES[rule])]
    excluded = [entry["where"] for entry in EXCLUSIONS.get(rule, [])]
    assert not [text for text in found if not text.startswith(tuple(excluded))]
    assert not [where for where in excluded if not any(text.startswith(where) for text in found)]


def test_exclusions_have_reasons_and_rules_that_exist() -> None:
    assert EXCLUSIONS.keys() <= RULES.keys()
    assert all(entry["reason"] for entries in EXCLUSIONS.values() for entry in entries)


def _panel(model: dict[str, Any], **changes: Any) -> None:
    model["panels"][0] |= changes


def _query(model: dict[str, Any], expression: str) -> None:
    _panel(model, targets=[{"expr": expression}])


BREAKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "template-datasource-rule": lambda m: m["templating"]["list"].pop(0),
    "template-job-rule": lambda m: None,
    "template-instance-rule": lambda m: None,
    "template-on-time-change-reload-rule": lambda m: m["templating"]["list"][1].update(refresh=1),
    "template-used": lambda m: m["templating"]["list"].append({"name": "other", "type": "custom"}),
    "panel-datasource-rule": lambda m: _panel(m, datasource={"type": "prometheus", "uid": "mine"}),
    "panel-title-description-rule": lambda m: _panel(m, description=""),
    "panel-units-rule": lambda m: _panel(m, fieldConfig={"defaults": {"unit": "parsecs"}}),
    "panel-no-targets-rule": lambda m: _panel(m, targets=[]),
    "target-rate-interval-rule": lambda m: _query(m, 'sum(rate(grpo_x_total{a="b"}[5m]))'),
    "target-counter-agg-rule": lambda m: _query(m, "sum(grpo_x_total)"),
    "target-job-rule": lambda m: None,
    "target-instance-rule": lambda m: None,
    "uneditable-dashboard": lambda m: m.update(editable=True),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_what_breaks_it(rule: str) -> None:
    model = copy.deepcopy(MODELS["grpo-job"])
    BREAKS[rule](model)
    assert findings(model, RULES[rule])


def test_labels_of_pods_and_jobs_are_told_from_prometheus_own_job() -> None:
    model = copy.deepcopy(MODELS["grpo-job"])
    model["panels"] = model["panels"][:1]
    for query, wrong in {
        'grpo_x{rl_grpo_dev_job="a"}': True,
        'grpo_x{a="b",job=~"$job"} / grpo_y': True,
        'grpo_x{job=~"$job"}': False,
    }.items():
        _query(model, query)
        assert bool(findings(model, RULES["target-job-rule"])) is wrong
