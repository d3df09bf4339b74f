"""Contents of a pack, which replace what a machine without a network cannot build or download.

`make gpu-node-pack` makes packs.

GRPO_DEVCLUSTER_PACK names the pack's folder. In it are: bin/ (components by the content of their pins),
tools/ (links to them by plain names), debian/ (unpacked packages), images/, sources/ (of Go modules), site/.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from grpo_devcluster.stages import StageError

SITE = "site"  # folder of Python packages that the machine's environment lacks; not in every pack
_PROGRAMS = ("tools", "debian/usr/sbin", "debian/usr/bin", "debian/sbin", "debian/bin")
_LIBRARIES = ("debian/usr/lib/x86_64-linux-gnu", "debian/lib/x86_64-linux-gnu")
_XTABLES = "debian/usr/lib/x86_64-linux-gnu/xtables"
# Parts of /usr/local only: the driver's files in it must reach a pod by CDI alone.
_SYSTEM = (
    *("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/libexec", "usr/include", "usr/share"),
    *("usr/local/bin", "usr/local/lib", "etc/alternatives"),
)
_ROOTS = (Path("/usr"), Path("/usr/local"))


def tool_environment(pack: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which packed tools and their libraries are found, before the machine's tools.

    XTABLES_LIBDIR fits the packed iptables only, which is why the machine's must not come first.
    """
    path = [*_below(pack, _PROGRAMS), *_split(inherited, "PATH")]
    libraries = [*_split(inherited, "LD_LIBRARY_PATH"), *_below(pack, _LIBRARIES)]
    return {
        "PATH": ":".join(dict.fromkeys(path)),
        "LD_LIBRARY_PATH": ":".join(dict.fromkeys(libraries)),
        "XTABLES_LIBDIR": str(pack / _XTABLES),
    }


def _below(pack: Path, parts: tuple[str, ...]) -> list[str]:
    return [str(pack / part) for part in parts]


def _split(inherited: Mapping[str, str], name: str) -> list[str]:
    return [part for part in inherited.get(name, "").split(":") if part]


def require_parts(pack: Path) -> None:
    """Raise StageError if the pack has no tools or no images."""
    missing = [part for part in ("debian", "images") if not (pack / part).is_dir()]
    if missing:
        raise StageError(
            f"GRPO_DEVCLUSTER_PACK={pack} has no {' and no '.join(missing)}. Bring the calls of "
            "build/gpu-node that have these archives, and run devcluster/gpu-node.sh receive."
        )


def image_references(pack: Path) -> dict[str, str]:
    """Return the references of the packed images by name."""
    references: dict[str, str] = json.loads((pack / "images" / "references.json").read_text())
    return references


def host_mounts(prefix: Path, base: Path, root: Path = Path("/")) -> list[Path]:
    """Return the machine's folders that a pod mounts to run the Python environment that runs this.

    ``prefix``: the environment. ``base``: the Python that it was made with. ``root``: the machine's root.
    """
    mounts = [Path("/") / part for part in _SYSTEM if (root / part).is_dir()]
    cuda = root / "usr/local/cuda"
    toolkit = [Path("/") / cuda.resolve().relative_to(root.resolve())] if cuda.is_dir() else []
    for folder in (prefix, base, *toolkit):
        covered = folder in _ROOTS or any(folder == m or m in folder.parents for m in mounts)
        if not covered:
            mounts.append(folder)
    return mounts
