"""The notebook of the docs."""

import json
from pathlib import Path
from typing import Any

from grpo_devcluster.paths import REPO

NOTEBOOK = REPO / "docs" / "guides" / "first-job.ipynb"


def code_cells(notebook: Path = NOTEBOOK) -> list[dict[str, Any]]:
    """Return the cells with code."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def source_of(tag: str) -> str:
    """Return the code of the cell with a tag."""
    (cell,) = (cell for cell in code_cells() if tag in cell["metadata"].get("tags", ()))
    return "".join(cell["source"])
