"""Archives that depend on the content of their files alone."""

import hashlib
import io
import lzma
import shutil
import tarfile
from pathlib import Path

# Calls in x86 code name the same target differently at each place; the first filter makes them alike.
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**26}]


def tar(tree: Path) -> bytes:
    """Return a tar archive of a folder's content, without owners, times and modes of this machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(tree.rglob("*")):
            archive.add(path, str(path.relative_to(tree)), recursive=False, filter=_plain)
    return buffer.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    if entry.islnk():  # which of the names has the content would depend on the order
        raise ValueError(f"{entry.name} is a hard link to another file of the tree: copy it")
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    sticky = entry.mode & 0o1000
    entry.mode = 0o1777 if sticky else 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def copy(source: Path, target: Path) -> None:
    """Copy a folder without what Python compiled, which depends on the machine."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))


def key(content: bytes) -> str:
    """Return the short digest that names an archive of this content."""
    return hashlib.sha256(content).hexdigest()[:16]


def compress(content: bytes) -> bytes:
    """Return the content as xz, made for programs."""
    return lzma.compress(content, format=lzma.FORMAT_XZ, filters=_FILTERS)


def extract(packed: bytes, target: Path) -> None:
    """Extract a compressed archive into a folder, over what is there."""
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
        # As an attribute, because Python 3.11.2 has no argument for it.
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)
        archive.extractall(target)  # noqa: S202 - its digest was checked
