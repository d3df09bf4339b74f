"""MkDocs builds the site of the documentation without a warning, and mike puts versions side by side."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from grpo_devcluster.site.__main__ import build
from grpo_devcluster.site.publish import BRANCH, publish

pytestmark = pytest.mark.slow


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    assert build(tmp_path) == 0  # it fails when a page would load anything from another host

    overview = (tmp_path / "concepts" / "overview" / "index.html").read_text()
    assert 'class="mermaid"' in overview and '<script src="../../assets/mermaid.min.js">' in overview
    assert (tmp_path / "assets" / "mermaid.min.js").stat().st_size > 1_000_000
    glossary = (tmp_path / "glossary" / "index.html").read_text()
    assert "mermaid.min.js" not in glossary and '"provider": "mike"' not in glossary

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


def test_versions_are_published_side_by_side_with_a_selector_and_the_newest_as_latest(tmp_path: Path) -> None:
    git = ["git", "--git-dir", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet", "--bare"], check=True)
    who = {"GIT_COMMITTER_NAME": "docs", "GIT_COMMITTER_EMAIL": "docs@example.com"}
    for version in ("0.2.0", "0.10.0", "0.2.1"):  # the last one corrects an old release
        publish(version, {"GIT_DIR": str(tmp_path)} | who)

    def show(path: str) -> str:
        command = [*git, "show", f"{BRANCH}:{path}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    versions = {entry["version"]: entry["aliases"] for entry in json.loads(show("versions.json"))}
    assert versions == {"0.10.0": ["latest"], "0.2.1": [], "0.2.0": []}
    assert show("latest") == "0.10.0", "a link to the folder"
    assert "latest/" in show("index.html")
    for version in versions:
        page = show(f"{version}/guides/runbooks/index.html")
        settings = re.search(r'<script id="__config" type="application/json">(.*?)</script>', page)
        assert settings is not None
        assert json.loads(settings[1])["version"] == {"provider": "mike", "alias": True}
