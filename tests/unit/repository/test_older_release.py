"""Where the older release of the upgrade test comes from, and what is said where it is missing."""

import subprocess
from pathlib import Path

import pytest

from support.older_release import COMMIT, unpack


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two commits, the first of which has an operator that says so."""
    made = tmp_path / "repository"
    made.mkdir()
    _git(made, "init", "--quiet", "--initial-branch=main")
    for text in ("older", "newer"):
        for part in ("operator", "crds", "helm", "manifests", "worker_images"):
            (made / part).mkdir(exist_ok=True)
            (made / part / "text").write_text(text)
        _git(made, "add", ".")
        _git(made, "commit", "--quiet", "-m", text)
    return made


def test_the_older_release_is_unpacked_from_its_commit(repository: Path, tmp_path: Path) -> None:
    first = _git(repository, "rev-parse", "HEAD~1")
    release = unpack(tmp_path / "older", repository, first)
    assert (release.root / "operator" / "text").read_text() == "older"
    assert not (release.root / "worker_images").exists()


def test_a_copy_without_the_commit_skips_the_test(repository: Path, tmp_path: Path) -> None:
    first = _git(repository, "rev-parse", "HEAD~1")
    _git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", "shallow")
    for folder, commit in ((tmp_path / "shallow", first), (repository, COMMIT), (tmp_path, COMMIT)):
        with pytest.raises(pytest.skip.Exception, match="use a clone with all commits"):
            unpack(tmp_path / "older", folder, commit)
