"""Measured memory of an agent. A rehearsal's agents stand in, so their own memory says nothing."""

import json

from grpo_devcluster.results import RESULTS

AGENT_RSS_OF = "one agent that streams 2 GB of weights into an engine on a CPU (sync.agent_rss_mib_max)"


def agent_rss() -> int | None:
    """Return the largest resident size of an agent in bytes, as recorded; None before it was recorded."""
    file = RESULTS / "sync.json"
    figures = json.loads(file.read_text())["figures"] if file.is_file() else {}
    mebibytes = figures.get("agent_rss_mib_max")
    return None if mebibytes is None else round(mebibytes * 2**20)
