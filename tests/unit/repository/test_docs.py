"""The documentation is complete, current and connected: generated pages, lengths, links and paths."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO
from grpo_devcluster.reference.helm import value_rows
from grpo_devcluster.reference.pages import chart_files, pages

GENERATED, GENERATED_FOR_CHART = pages(), chart_files()  # take seconds to make
DOCS = REPO / "docs"
REFERENCE = DOCS / "reference"
ROOT_PAGES = [REPO / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
PAGES = [*ROOT_PAGES, *sorted(DOCS.rglob("*.md"))]
MAX_LINES = {REPO / "README.md": 170}
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^ {4}make ([a-z-]+)\b", re.MULTILINE)
SOURCE = re.compile(r"`([\w./-]+/[\w./-]*\.py|[\w./-]+/)`")
# A path in the docs is relative to one of these.
ROOTS = [
    REPO,
    REPO / "operator" / "grpo_operator",
    REPO / "operator" / "grpo_operator" / "plan" / "planner",
    REPO / "worker_images" / "grpo_worker",
    REPO / "worker_images" / "grpo_worker" / "weightsync",
    REPO / "worker_images" / "grpo_worker" / "weightsync" / "planner",
]
# Folders of a job's store and of the machine.
STORED = (
    "attempts/", "export/", "logs/", "pending/", "profile/", "samples/", "tensorboard/",
    "trackers/", "trackio/", "validation_samples/", "volumes/", "wandb/", "/",
)  # fmt: skip


def name_of(page: Path) -> str:
    return str(page.relative_to(REPO))


def text_of(page: Path) -> str:
    """Return the page without its code blocks."""
    return CODE_BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub derives them."""
    titles = (re.sub(r"[`*_]|\[|\]\([^)]*\)", "", title) for title in HEADING.findall(text_of(page)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the target and the anchor of each relative link."""
    for link in LINK.findall(text_of(page)):
        if "://" not in link and not link.startswith("mailto:"):
            path, _, anchor = link.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def schema_properties(node: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and schema of each value."""
    for key, inner in node.get("properties", {}).items():
        path = f"{at}.{key}".lstrip(".")
        yield path, inner
        yield from schema_properties(inner, path)


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_a_generated_page_is_current(name: str) -> None:
    page = REFERENCE / name
    assert page.is_file() and page.read_text() == GENERATED[name], f"docs/reference/{name}: run make docs"


@pytest.mark.parametrize("name", sorted(GENERATED_FOR_CHART))
def test_a_generated_file_of_the_chart_is_current(name: str) -> None:
    assert (CHART / name).read_text() == GENERATED_FOR_CHART[name], f"{CHART.name}/{name}: run make docs"


def test_every_value_of_the_chart_is_described() -> None:
    described = {path: text for path, _, text in value_rows(CHART / "values.yaml")}
    assert len(described) > 40 and [path for path, text in described.items() if not text] == []
    properties = dict(schema_properties(json.loads((CHART / "values.schema.json").read_text())))
    assert described.keys() <= properties.keys()
    assert [path for path, node in properties.items() if not node.get("description")] == []


def test_reference_has_generated_pages_only() -> None:
    assert {page.name for page in REFERENCE.iterdir()} == GENERATED.keys()


@pytest.mark.parametrize("page", [p for p in PAGES if REFERENCE not in p.parents], ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    lines = len(page.read_text().splitlines())
    assert lines <= MAX_LINES.get(page, 150), f"{name_of(page)} has {lines} lines: split it by subject"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{name_of(page)}: {target} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: {target.name} has no heading #{anchor}"


def test_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    following = [DOCS / "index.md"]
    while following:
        page = following.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            following += [target for target, _ in links(page)]
    missing = {name_of(page) for page in DOCS.rglob("*.md")} - {name_of(page) for page in reached}
    assert not missing, f"no page links to {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_of_the_repository_exist(page: Path) -> None:
    for path in SOURCE.findall(text_of(page)):
        if not path.startswith(STORED):
            assert any((root / path).exists() for root in ROOTS), f"{name_of(page)}: there is no {path}"


def test_every_alert_has_a_runbook() -> None:
    groups = yaml.safe_load((REPO / "helm" / "grpo-operator" / "files" / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    sections = HEADING.findall((DOCS / "guides" / "runbooks.md").read_text())
    assert set(sections[1:]) == alerts and len(sections) == len(alerts) + 1


def test_readme_shows_the_columns_of_kubectl_get() -> None:
    text = (REPO / "README.md").read_text()
    for crd in sorted((REPO / "crds").glob("*.yaml")):
        (version,) = yaml.safe_load(crd.read_text())["spec"]["versions"]
        columns = ["NAME", *(column["name"].upper() for column in version["additionalPrinterColumns"])]
        assert columns in [line.split() for line in text.splitlines()], (
            f"README shows other columns than {crd.name}"
        )


def test_readme_has_a_command_to_try_within_40_lines() -> None:
    beginning = "\n".join((REPO / "README.md").read_text().splitlines()[:40])
    commands = COMMAND.findall(beginning)
    assert commands, "README: the first command is after line 40"
    assert f"\n{commands[0]}:" in (REPO / "Makefile").read_text(), f"make {commands[0]} does not exist"
