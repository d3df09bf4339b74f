"""``python -m grpo_devcluster.dashboards DIRECTORY`` writes a JSON file for each dashboard."""

import sys
from pathlib import Path

from grpo_devcluster.dashboards.files import files


def main() -> None:
    """Write the dashboards below the directory given as the only argument."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m grpo_devcluster.dashboards DIRECTORY")
    for name, text in files().items():
        (Path(sys.argv[1]) / name).write_text(text)


if __name__ == "__main__":
    main()
