"""Debian packages without dpkg: downloaded, and unpacked into a tree beside the system."""

import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from grpo_devcluster.paths import CACHE
from grpo_devcluster.stages import StageError, run

# What a node needs that a minimal system lacks. containerd is built instead; openssl is the system's.
NODE = (
    *("runc", "libseccomp2", "containernetworking-plugins"),
    *("iptables", "libxtables12", "libmnl0", "libnftnl11", "libip4tc2", "libip6tc2"),
    *("conntrack", "libnetfilter-conntrack3", "libnfnetlink0"),
    *(
        "iproute2",
        "libbpf1",
        "libbsd0",
        "libmd0",
        "libcap2",
        "libelf1",
        "zlib1g",
        "libselinux1",
        "libpcre2-8-0",
    ),
)
NODE_FILES = (
    *("usr/sbin/runc", "usr/sbin/xtables-nft-multi", "usr/sbin/conntrack", "usr/bin/ip"),
    *(f"usr/lib/cni/{plugin}" for plugin in ("bridge", "host-local", "loopback", "portmap")),
    "usr/lib/x86_64-linux-gnu/*",
)
# Alternatives, which packages make when they are installed.
NODE_LINKS = {
    f"usr/sbin/{name}{action}": "xtables-nft-multi"
    for name in ("iptables", "ip6tables")
    for action in ("", "-save", "-restore")
}

# Debian's Python for the operator's image, with what its standard library loads.
PYTHON = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "python3.11"),
    *("libc6", "libgcc-s1", "libssl3", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5"),
    *("libuuid1", "libcrypt1", "libsqlite3-0", "libnsl2", "libtirpc3", "libgssapi-krb5-2", "libkrb5-3"),
    *("libk5crypto3", "libkrb5support0", "libcom-err2", "libkeyutils1", "libdb5.3", "libreadline8"),
    *("libncursesw6", "libtinfo6"),
)
PYTHON_FILES = ("usr/bin/python3.11", "usr/lib/*", "usr/lib64/*")
PYTHON_LINKS = {"usr/bin/python3": "python3.11"}

_NOT_NEEDED = ("usr/share/*", "*/__pycache__/*", "usr/lib/*/gconv/*", "usr/lib/*/audit/*", "usr/lib/*/tc/*")
_MERGED = re.compile(r"^(bin|sbin|lib|lib64)(?=/|$)")
_GLIBC = re.compile(r"^(libc|libm|libdl|librt|libpthread|libresolv|libutil|ld-linux-x86-64)\.so\.\d$")
_REMEDY = "Check that apt-get reaches a Debian 12 mirror, then run the command again."


def download(packages: Sequence[str]) -> list[Path]:
    """Download packages into the cache and return their files; what is there is not fetched again."""
    folder = CACHE / "debian"
    folder.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "download", "--print-uris", *packages]
    # In another folder than theirs: apt does not list what is there already.
    listed = run(command, step="finding Debian packages", remedy=f"apt-get update. {_REMEDY}", cwd=CACHE)
    files = [folder / line.split()[1] for line in listed.splitlines() if line.startswith("'")]
    if not all(file.exists() for file in files):
        command = ["apt-get", "download", *packages]
        run(command, step="downloading Debian packages", remedy=_REMEDY, cwd=folder)
    return sorted(files)


def place(name: str) -> str:
    """Return where a file of a package lies in a tree in which /bin, /sbin and /lib are links into /usr."""
    return _MERGED.sub(r"usr/\1", name.removeprefix("./").strip("/"))


def wanted(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a tree keeps this path."""
    return any(fnmatch(path, p) for p in patterns) and not any(fnmatch(path, p) for p in _NOT_NEEDED)


def unpack(package: Path, tree: Path, patterns: Sequence[str]) -> None:
    """Unpack the wanted files of a package; links to absolute paths lead into the tree."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    content = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for entry in archive:
            path = place(entry.name)
            if entry.isdir() or not wanted(path, patterns):
                continue
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if entry.issym():
                link = entry.linkname
                inside = link.startswith("/")
                target.symlink_to(os.path.relpath(tree / place(link), target.parent) if inside else link)
            elif source := archive.extractfile(entry):
                target.write_bytes(source.read())
                target.chmod(entry.mode & 0o777)


def tree_of(
    packages: Sequence[str], files: Sequence[str], links: dict[str, str], tree: Path, *, glibc: bool
) -> None:
    """Make a tree of packages and check that its programs find their libraries in it.

    ``glibc``: whether the system that the tree lies beside has the C library.
    """
    for package in download(packages):
        unpack(package, tree, files)
    for name, destination in links.items():
        (tree / name).symlink_to(destination)
    missing = missing_libraries(tree, glibc=glibc)
    if missing:
        raise StageError(
            f"the tree of {', '.join(packages[:3])} … lacks {missing}: name the packages with them"
        )


def missing_libraries(tree: Path, *, glibc: bool) -> dict[str, list[str]]:
    """Return what programs and libraries of a tree need and the tree lacks, by file."""
    have = {path.name for path in tree.rglob("*.so*")}
    missing = {}
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            lacks = [n for n in _needed(path) if n not in have and not (glibc and _GLIBC.match(n))]
            if lacks:
                missing[str(path.relative_to(tree))] = lacks
    return missing


def _needed(path: Path) -> list[str]:
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return []
    readelf = shutil.which("readelf") or "readelf"
    text = run([readelf, "-d", path], step="reading needed libraries", remedy="Install binutils.")
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)
