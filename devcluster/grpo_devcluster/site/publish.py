"""``python -m grpo_devcluster.site.publish [REMOTE]``: publish the site of this version beside the others.

mike builds the site and commits it, with the list of versions, to the branch ``gh-pages`` of the repository.
With REMOTE that branch is fetched first and pushed afterwards.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping

from grpo_devcluster.paths import REPO
from grpo_devcluster.release.version import current
from grpo_devcluster.site.__main__ import SITE
from grpo_devcluster.site.foreign import foreign_requests
from grpo_devcluster.site.tools import python
from grpo_devcluster.stages import StageError, fail, run

BRANCH = "gh-pages"
LATEST = "latest"  # alias of the newest version, to which the site's root leads
_BUILD = "Correct what it names; make site shows the same warnings."
_GIT = "Check the remote and your rights there."


def publish(version: str, environment: Mapping[str, str] | None = None) -> None:
    """Commit the site of a version. ``environment``: for git, such as GIT_DIR of another repository.

    Raises StageError when the site has warnings, or its pages would load files from other hosts.
    """
    home = python().parent
    env = os.environ | {"PYTHONPATH": str(REPO / "devcluster"), "NO_MKDOCS_2_WARNING": "1"}
    env |= {"PATH": f"{home}:{os.environ['PATH']}"} | dict(environment or {})
    mike = home / "mike"
    alias = [LATEST] if is_newest(version, _published(env)) else []
    to = ["--branch", BRANCH, "--message", f"site of {version}"]
    deploy = [mike, "deploy", *to, "--update-aliases", version, *alias]
    run(deploy, step=f"building the site of {version}", remedy=_BUILD, env=env, cwd=REPO)
    if found := foreign_requests(SITE):
        raise StageError("pages of the site load files from other hosts:\n" + "\n".join(found))
    default = [mike, "set-default", *to, LATEST]
    run(default, step="setting the default version", remedy=_BUILD, env=env, cwd=REPO)


def is_newest(version: str, published: Iterable[str]) -> bool:
    """Return whether no published version is newer: a fix of an old release does not become the latest."""
    return all(_numbers(version) >= _numbers(other) for other in published)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _published(env: Mapping[str, str]) -> list[str]:
    """Return the versions that the branch has."""
    command = ["git", "show", f"{BRANCH}:versions.json"]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    return [entry["version"] for entry in json.loads(done.stdout)] if done.returncode == 0 else []


def _fetch(remote: str) -> None:
    """Let the branch be that of the remote, if it has one."""
    if _git("ls-remote", "--heads", remote, BRANCH):
        _git("fetch", remote, f"{BRANCH}:{BRANCH}")


def _git(*arguments: str) -> str:
    return run(["git", *arguments], step=f"git {arguments[0]}", remedy=_GIT, cwd=REPO)


def main() -> None:
    """Publish the site of the checkout's version."""
    remotes = sys.argv[1:2]
    try:
        for remote in remotes:
            _fetch(remote)
        publish(current())
        for remote in remotes:
            _git("push", remote, f"{BRANCH}:{BRANCH}")
    except StageError as error:
        fail(error)
    print(f"branch {BRANCH} has the site of {current()}")


if __name__ == "__main__":
    main()
