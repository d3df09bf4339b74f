"""MkDocs' hooks of ``mkdocs.yml``: navigation, files outside ``docs``, diagrams, the selector of versions."""

import os
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

from grpo_devcluster.paths import REPO
from grpo_devcluster.site.links import DOCS, is_copied, outside, page_of, rewritten, site_path
from grpo_devcluster.site.nav import navigation
from grpo_devcluster.site.tools import mermaid

_OF_MIKE = "MIKE_DOCS_VERSION"  # mike sets it: the site becomes one of several versions
_MERMAID = "assets/mermaid.min.js"


def on_config(config: Any) -> Any:
    """Set the navigation, and the theme's selector if there are versions: it reads ``../versions.json``."""
    config.nav = navigation(Path(config.docs_dir))
    if os.environ.get(_OF_MIKE):
        config.extra["version"] = {"provider": "mike", "alias": True}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files that pages link to, and the library that draws diagrams."""
    for path in outside(REPO):
        uri = site_path(REPO, path)
        source = {"abs_src_path": str(REPO / path)} if is_copied(path) else {"content": page_of(REPO, path)}
        files.append(File.generated(config, uri, inclusion=InclusionLevel.NOT_IN_NAV, **source))
    files.append(File.generated(config, _MERMAID, abs_src_path=str(mermaid())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Direct links at the site's copies; leave out comments."""
    generated = page.file.generated_by is not None
    return markdown if generated else rewritten(REPO, f"{DOCS}/{page.file.src_uri}", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let pages with diagrams load Mermaid from the site; the theme would take it from another host."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{"../" * page.url.count("/")}{_MERMAID}"></script>'
    return output.replace("</head>", f"{script}</head>", 1)
