"""The dashboards as files of the chart (pure)."""

import json

from grpo_devcluster.dashboards.pages import DASHBOARDS


def files() -> dict[str, str]:
    """Return the text of each file by its name."""
    return {f"{page.uid}.json": json.dumps(page.model(), indent=1) + "\n" for page in DASHBOARDS}
