"""Directories of the devcluster. Only the cache is kept by ``down``."""

import hashlib
import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("GRPO_CACHE", Path.home() / ".cache" / "grpo-operator"))
_PACK = os.environ.get("GRPO_DEVCLUSTER_PACK")
PACK = Path(_PACK).resolve() if _PACK else None  # what `make gpu-node-pack` packed; nothing is built then
RUN = Path("/run/grpo-devcluster")  # certificates, sockets, pids, logs, etcd data
LIB = Path("/var/lib/grpo-devcluster")  # kubelet root, job data
KUBECONFIG = RUN / "admin.kubeconfig"
LOGS = RUN / "logs"
JOB_DATA = LIB / "data"
SOCKETS = Path("/run/grpo-operator")  # where pods that share GPUs meet; kubelet makes it


def content_key(*parts: bytes) -> str:
    """Return a short digest of the inputs of a cache entry, which names the entry."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def tree_key(*roots: Path) -> str:
    """Return a digest of the names and contents of the files below ``roots``."""
    parts: list[bytes] = []
    for root in roots:
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        for file in files:
            if "__pycache__" not in file.parts:
                parts += [str(file.relative_to(root.parent)).encode(), file.read_bytes()]
    return content_key(*parts)
