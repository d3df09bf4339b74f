"""The chart's dashboards are those of the tables, and name only metrics that exist."""

import re

from grpo_devcluster.dashboards.files import files
from grpo_devcluster.dashboards.pages import DASHBOARDS
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO


def test_the_charts_files_are_generated() -> None:
    folder = CHART / "files" / "dashboards"
    assert {file.name: file.read_text() for file in folder.iterdir()} == files(), "run make dashboards"


def test_panels_have_an_id_and_a_place_of_their_own() -> None:
    for page in DASHBOARDS:
        panels = page.model()["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


def test_queries_name_metrics_of_the_reference() -> None:
    known = set(re.findall(r"`(grpo_\w+)`", (REPO / "docs" / "reference" / "metrics.md").read_text()))
    for page in DASHBOARDS:
        for panel in page.panels:
            named = {name.removesuffix("_bucket") for name in re.findall(r"\bgrpo_\w+", panel.query)}
            assert named and named <= known, panel.title
