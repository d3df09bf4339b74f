"""``python -m grpo_devcluster.reference docs/reference`` writes every generated page and file."""

import sys
from pathlib import Path

from grpo_devcluster.install import CHART
from grpo_devcluster.reference.faults import record_rows
from grpo_devcluster.reference.pages import chart_files, pages


def main() -> None:
    """Write the pages below the directory given as the only argument."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m grpo_devcluster.reference DIRECTORY")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text)
    for name, text in chart_files().items():
        (CHART / name).write_text(text)
    record_rows()


if __name__ == "__main__":
    main()
