"""``python -m grpo_devcluster.site``: build the site in ``build/site``, strictly."""

import os
import subprocess
import sys
from pathlib import Path

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import record_from_test
from grpo_devcluster.site.foreign import foreign_requests
from grpo_devcluster.site.tools import python
from grpo_devcluster.stages import StageError, fail

SITE = REPO / "build" / "site"


def build(site: Path = SITE) -> int:
    """Build the site in ``site`` and return the number of MkDocs' warnings.

    Raises StageError when pages would load files from other hosts, or MkDocs fails without a warning.
    """
    command = [str(python()), "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = os.environ | {"PYTHONPATH": str(REPO / "devcluster"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for warning in warnings:
        print(warning)
    if done.returncode and not warnings:
        raise StageError(f"building the site failed (exit {done.returncode}):\n{done.stderr}")
    if not warnings and (found := foreign_requests(site)):
        raise StageError("pages of the site load files from other hosts:\n" + "\n".join(found))
    return len(warnings)


def main() -> None:
    """Build the site and record ``experience.docs_warnings``; end with code 1 if there are any."""
    try:
        warnings = build()
    except StageError as error:
        fail(error)
    record_from_test("experience", {"docs_warnings": warnings})
    if warnings:
        sys.exit(f"{warnings} warnings")
    print(f"{SITE}: python3 -m http.server -d {SITE.relative_to(REPO)} shows it")


if __name__ == "__main__":
    main()
