"""MkDocs builds the site of the documentation without a warning."""

import json
import re
from pathlib import Path

import pytest

from grpo_devcluster.site.__main__ import build

pytestmark = pytest.mark.slow


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    assert build(tmp_path) == 0  # it fails when a page would load anything from another host

    overview = (tmp_path / "concepts" / "overview" / "index.html").read_text()
    assert 'class="mermaid"' in overview and '<script src="../../assets/mermaid.min.js">' in overview
    assert (tmp_path / "assets" / "mermaid.min.js").stat().st_size > 1_000_000
    assert "mermaid.min.js" not in (tmp_path / "glossary" / "index.html").read_text()

    found = [
        entry["location"] for entry in json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    ]
    assert "guides/troubleshooting/#the-job-does-not-start" in found
    assert not [location for location in found if location.startswith("files/")]

    faults = (tmp_path / "reference" / "faults" / "index.html").read_text()
    assert "../../files/tests/worker/test_hang.py/" in faults
    source = (tmp_path / "files/tests/worker/test_hang.py/index.html").read_text()
    assert "import</span>" in source and "<h1" in source
    keys = [
        page for page in tmp_path.rglob("*.html") if re.search(r"<!--[^>]*\w+\.\w+[^>]*-->", page.read_text())
    ]
    assert not keys, "keys of figures are left out"
