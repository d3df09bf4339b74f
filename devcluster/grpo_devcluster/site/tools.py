"""Tools that build the site: MkDocs with the theme Material from ``uv.lock``, and Mermaid from npm."""

import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from grpo_devcluster.packages import install_debian, uv, uv_environment
from grpo_devcluster.paths import CACHE, REPO, content_key
from grpo_devcluster.stages import StageError, run

MERMAID = "11.17.2"
_SHA256 = "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8"


def python() -> Path:
    """Return the Python of an environment with the group ``site`` of uv.lock; install it if needed."""
    inputs = [(REPO / name).read_bytes() for name in ("uv.lock", "pyproject.toml")]
    home = CACHE / f"site-{content_key(*inputs)}"
    stamp = home / ".installed"
    if not stamp.exists():
        sync = ["sync", "--frozen", "--only-group", "site", "--python", sys.executable]
        remedy = "Check that uv reaches a package index, then run the command again."
        env = uv_environment() | {"UV_PROJECT_ENVIRONMENT": str(home)}
        run([uv(), *sync], step="installing MkDocs", remedy=remedy, env=env, cwd=REPO)
        stamp.touch()
    return home / "bin" / "python"


def mermaid() -> Path:
    """Return the library that draws the pages' diagrams in the browser; fetch it if needed."""
    target = CACHE / f"mermaid-{MERMAID}.min.js"
    if not target.exists():
        if shutil.which("npm") is None:
            install_debian(["npm"])
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = ["npm", "pack", f"mermaid@{MERMAID}", "--pack-destination", folder]
            remedy = "Check that npm reaches a registry, then run the command again."
            run(command, step="fetching Mermaid", remedy=remedy)
            script = Path(folder) / target.name
            script.write_bytes(_packed(Path(folder) / f"mermaid-{MERMAID}.tgz"))
            script.rename(target)
    return target


def _packed(archive: Path) -> bytes:
    """Return the script of npm's package. Raises StageError if it is not the one that was reviewed."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile("package/dist/mermaid.min.js")
        content = member.read() if member else b""
    digest = hashlib.sha256(content).hexdigest()
    if digest != _SHA256:
        raise StageError(f"mermaid.min.js of npm's mermaid {MERMAID} has the SHA-256 {digest}, not {_SHA256}")
    return content
