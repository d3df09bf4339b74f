"""A real Prometheus, configured by Prometheus Operator from the chart, scrapes a real job."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from grpo_devcluster.dashboards.pages import DASHBOARDS
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import CHART
from grpo_devcluster.results import record_from_test
from support.faults import kill_rank, report, until, wait_step
from support.jobs import Start
from support.nvml_shim import DEGRADED, NvmlShim
from support.prometheus import TARGETS, Prometheus, scraped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
RESTARTS = 4  # in an hour raise GRPOJobRestartsOften


@pytest.fixture(scope="module")
def job(start: Start, tmp_path_factory: pytest.TempPathFactory) -> JobView:
    """A job with copies in memory, whose agents see a degraded GPU: without these, panels have no data."""
    shim = NvmlShim(tmp_path_factory.mktemp("nvml"))
    shim.set(*DEGRADED)

    def change(spec: dict[str, Any]) -> None:
        spec["checkpoint"]["memory"] = {}
        spec["trainer"]["podTemplate"] = {"spec": shim.pod_spec("initContainers")}
        spec["rollout"]["template"]["podTemplate"] = {"spec": shim.pod_spec("containers")}

    job = start("scraped", steps=100_000, restartPolicy={"backoffSeconds": 1}, change=change)
    wait_step(job, 3, 900)
    return job


@pytest.fixture(scope="module")
def server(
    chart_values: dict[str, Any], job: JobView, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    with scraped(chart_values, tmp_path_factory.mktemp("prometheus")) as server:
        yield server


def test_all_pods_of_a_job_are_scraped(server: Prometheus, job: JobView) -> None:
    targets = until("all targets are up", lambda: _all_up(server), 120)
    pools: dict[str, int] = {}
    for target in targets:
        monitor = target["scrapePool"].split("/")[2]
        pools[monitor] = pools.get(monitor, 0) + 1
    assert pools == TARGETS


def test_series_name_the_job(server: Prometheus, job: JobView) -> None:
    """The operator's series keep the job's namespace, those of pods have its name as a label."""
    own = f'namespace="{job.namespace}",name="{job.name}"'
    (step,) = until("steps", lambda: server.query(f"grpo_job_step{{{own}}}"), 120)
    assert float(step["value"][1]) >= 3
    label = f'namespace="{job.namespace}",rl_grpo_dev_job="{job.name}"'
    assert until("rewards", lambda: server.query(f'grpo_metric{{{label},name="critic/score/mean"}}'), 120)
    assert len(server.query(f"grpo_weight_version{{{label}}}")) == 2


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank, four times",
    witness="restarts counted; GRPOJobRestartsOften is firing in Prometheus and names the job",
    bound="60 s after the fourth",
    partial="the alert; nothing compared",
)
def test_an_alert_fires_for_a_job_that_restarts_often(server: Prometheus, job: JobView) -> None:
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    alerts = server.alerts()
    assert set(alerts) == {rule["alert"] for group in rules for rule in group["rules"]}
    assert [name for name, rule in alerts.items() if rule["state"] == "firing"] == []
    for count in range(1, RESTARTS + 1):
        _restart(job, count)
    often = until("the alert fires", lambda: _firing(server, "GRPOJobRestartsOften"), 60)
    (alert,) = often
    assert (alert["labels"]["namespace"], alert["labels"]["name"]) == (job.namespace, job.name)
    said = f"GRPOJob {job.namespace}/{job.name} restarted more than 3 times in an hour"
    assert alert["annotations"]["summary"] == said
    assert {rule["health"] for rule in server.alerts().values()} == {"ok"}


def test_every_query_of_the_dashboards_has_data(server: Prometheus, job: JobView) -> None:
    """Rates need two scrapes. The job has restarted, so it has recoveries."""
    queries = _dashboard_queries(job)
    try:
        until("data of each query", lambda: not _empty(server, queries), 150)
    finally:
        empty = _empty(server, queries)
        print("no data:", empty)
        share = 100 * (1 - len(empty) / len(queries))
        record_from_test(
            "experience",
            {"dashboard_queries": len(queries), "dashboard_queries_with_data_pct": round(share, 1)},
        )


def _empty(server: Prometheus, queries: list[str]) -> list[str]:
    return [query for query in queries if not server.query(query)]


def _all_up(server: Prometheus) -> list[dict[str, Any]] | None:
    targets = server.targets()
    up = [target["health"] for target in targets] == ["up"] * sum(TARGETS.values())
    return targets if up else None


def _dashboard_queries(job: JobView) -> list[str]:
    """Return the queries of all panels as Grafana asks them."""
    values = {"$namespace": job.namespace, "$job": job.name, "$__rate_interval": "1m"}
    queries = [panel.query for page in DASHBOARDS for panel in page.panels]
    for variable, value in values.items():
        queries = [query.replace(variable, value) for query in queries]
    return queries


def _firing(server: Prometheus, name: str) -> list[dict[str, Any]]:
    return [alert for alert in server.alerts()[name]["alerts"] if alert["state"] == "firing"]


def _restart(job: JobView, count: int) -> None:
    """Kill a rank; return when ``count`` restarts are counted and the next step is finished."""
    kill_rank(job)
    until(f"restart {count}", lambda: report(job)["restarts"]["infrastructure"] >= count, 120)
    wait_step(job, report(job)["step"] + 1, 300)
