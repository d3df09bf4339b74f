"""The site of the documentation, without MkDocs: navigation, links to files outside docs, no foreign host."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_devcluster.site.foreign import foreign_requests
from grpo_devcluster.site.links import outside, page_of, rewritten, site_path
from grpo_devcluster.site.nav import navigation
from grpo_devcluster.site.publish import is_newest

DOCS = REPO / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(REPO / path for path in outside(REPO) if path.endswith(".md"))]
# MkDocs reads these as a continuation of the paragraph before, or as text instead of code; GitHub does not.
BAD_INDENT = re.compile(
    r"^ {1,3}(?:[-*]|\d+\.) .*|(?<=\n\n) {1,3}(?:\S).*|(?<=:\n\n) {5,7}\S.*", re.MULTILINE
)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects and variables of the environment."""


_Loader.add_multi_constructor("", lambda _loader, suffix, _node: suffix)


def _configuration() -> dict[str, Any]:
    return dict(yaml.load((REPO / "mkdocs.yml").read_text(), _Loader))


def test_every_page_is_once_in_the_navigation() -> None:
    listed = [page for entry in navigation(DOCS) for pages in entry.values() for page in pages]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_a_page_without_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("# Index\n\n## Start\n\n- [a](a.md#x): b\n")
    (tmp_path / "a.md").write_text("# A\n\n[b](b.md)\n")
    assert navigation(tmp_path) == [{"Home": ["index.md"]}, {"Start": ["a.md"]}]
    (tmp_path / "b.md").write_text("# B\n")
    with pytest.raises(ValueError, match=r"links to no page of \['b.md'\]"):
        navigation(tmp_path)


def test_the_configuration_loads_nothing_from_other_hosts() -> None:
    configuration = _configuration()
    assert configuration["theme"]["font"] is False
    # With repo_url the theme asks GitHub for stars and releases; plugins and scripts may load what they like.
    assert configuration["plugins"] == ["search"]
    assert not configuration.keys() & {"repo_url", "extra_css", "extra_javascript", "extra"}


@pytest.mark.parametrize(
    ("version", "published", "newest"),
    [
        ("0.1.0", (), True),
        ("0.10.0", ("0.9.1", "0.2.0"), True),
        ("0.9.2", ("0.10.0", "0.9.1"), False),
        ("0.10.0", ("0.10.0",), True),
    ],
)
def test_only_the_newest_version_becomes_the_latest(
    version: str, published: tuple[str, ...], newest: bool
) -> None:
    assert is_newest(version, published) is newest


def test_warnings_fail_the_build() -> None:
    configuration = _configuration()
    assert configuration["strict"] is True
    assert {level for group in configuration["validation"].values() for level in group.values()} == {"warn"}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    for path, text in {
        "docs/guides/a.md": "# A\n",
        "docs/b.md": "[readme](../NOTES.md), [all](../tests), [plot](../plot.svg)\n",
        "NOTES.md": "[a](docs/guides/a.md), [c](c.yaml)\n",
        "c.yaml": "# a comment\nkind: C\n",
        "plot.svg": "<svg/>",
        "tests/test_x.py": 'TEXT = """\n~~~\n"""\n',
        "unlinked.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


LINKS = {
    "[x](../b.md#part)": "[x](../b.md#part)",
    "[x](../../c.yaml)": "[x](../files/c.yaml.md)",
    "[x](../../tests)": "[x](../files/tests/index.md)",
    "![x](../../plot.svg)": "![x](../files/plot.svg)",
    "[x](../../NOTES.md#n)": "[x](../files/NOTES.md#n)",
    "[x](#part), [y](https://kubernetes.io/docs)": "[x](#part), [y](https://kubernetes.io/docs)",
    "[x](../../missing.yaml)": "[x](../../missing.yaml)",
    "3.1<!-- a.b --> times<!--\n  a.c --> x": "3.1 times x",
    "2<!-- a.b -->\ntimes": "2\ntimes",
    "<!-- Generated. -->\n\n# Title": "# Title",
    "`1<!-- a.b -->`, [`x`](../../c.yaml)": "`1<!-- a.b -->`, [`x`](../files/c.yaml.md)",
    "```\n[x](../../c.yaml) <!-- y -->\n```": "```\n[x](../../c.yaml) <!-- y -->\n```",
}


@pytest.mark.parametrize("text", LINKS)
def test_links_of_a_page_lead_to_copies_in_the_site(text: str, repo: Path) -> None:
    assert rewritten(repo, "docs/guides/a.md", text) == LINKS[text]


def test_what_pages_link_to_is_in_the_site_with_what_that_links_to(repo: Path) -> None:
    assert outside(repo) == ["NOTES.md", "c.yaml", "plot.svg", "tests", "tests/test_x.py"]
    assert page_of(repo, "NOTES.md").endswith("\n[a](../guides/a.md), [c](c.yaml.md)\n")
    assert page_of(repo, "tests").endswith("# tests/\n\n- [test_x.py](test_x.py.md)\n")
    source = page_of(repo, "tests/test_x.py")
    assert source.startswith("---\nsearch:\n  exclude: true\n---\n\n# tests/test_x.py\n\n~~~~~~python\nTEXT")
    assert source.endswith('\n~~~\n"""\n~~~~~~\n')


def test_files_of_this_repository_can_be_pages() -> None:
    paths = outside(REPO)
    assert len({site_path(REPO, path) for path in paths}) == len(paths) > 50
    assert not [
        path for path in paths if (REPO / path).is_file() and "~~~~~~" in (REPO / path).read_text("latin-1")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_lists_are_indented_for_mkdocs_too(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not BAD_INDENT.findall(text), "indent by four columns, or by eight for code in a list"


def test_requests_of_other_hosts_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<link rel="canonical" href="https://a.example"><link rel="icon" href="https://b.example/x.png">'
        '<a href="https://c.example">c</a><script src="//d.example/x.js"></script>'
        '<script src="x.js"></script>'
        '<img src="https://e.example/x.png"><p style="background: url(https://f.example/x.png)">'
    )
    (tmp_path / "x.css").write_text(
        '@import "https://g.example/x.css"; a { background: url("data:image/png,") }'
    )
    assert [found.removeprefix("index.html: ") for found in foreign_requests(tmp_path)] == [
        "https://f.example/x.png", "https://b.example/x.png", "//d.example/x.js", "https://e.example/x.png",
        "x.css: https://g.example/x.css",
    ]  # fmt: skip
