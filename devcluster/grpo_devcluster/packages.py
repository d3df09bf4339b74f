"""Installs the Debian packages and the Python environment."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_devcluster.packed import require_parts, tool_environment
from grpo_devcluster.paths import CACHE, PACK, REPO, content_key
from grpo_devcluster.stages import run

DEBIAN = [
    "containerd",
    "runc",
    "containernetworking-plugins",
    "iptables",
    "buildah",
    "debootstrap",
    "openssl",
    "socat",
    "conntrack",
    "iproute2",
    "redis-tools",  # with the server; the package redis-server would start it
]
UV_VERSION = "0.13.8"


def use_packed_tools() -> None:
    """Let commands and daemons find the packed tools and their libraries; without a pack do nothing."""
    if PACK is not None:
        os.environ.update(tool_environment(PACK, os.environ))


def install_debian(names: Sequence[str] = DEBIAN) -> None:
    """Install the missing ones of these Debian packages, or use those of the pack."""
    if PACK is not None:
        require_parts(PACK)
        use_packed_tools()
        return
    installed = run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n"],
        step="listing Debian packages",
        remedy="The devcluster needs Debian 12; with a cluster of your own set KUBECONFIG instead.",
    )
    have = {line.split()[0] for line in installed.splitlines() if line.endswith(" installed")}
    missing = [name for name in names if name not in have]
    if not missing:
        return
    remedy = "Check that apt-get reaches a Debian 12 mirror, then run the command again."
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], step="apt-get update", remedy=remedy, env=env)
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    run(command, step=f"installing {' '.join(missing)}", remedy=remedy, env=env)


def uv() -> Path:
    """Return a pinned uv in the cache; install it if needed."""
    home = CACHE / f"uv-{UV_VERSION}"
    binary = home / "bin" / "uv"
    if not binary.exists():
        remedy = "Check that pip reaches a package index, then run the command again."
        shutil.rmtree(home, ignore_errors=True)
        run([sys.executable, "-m", "venv", home], step="creating a virtual environment", remedy=remedy)
        command = [home / "bin" / "pip", "install", "-q", f"uv=={UV_VERSION}"]
        run(command, step="installing uv", remedy=remedy)
    return binary


def sync_environment() -> None:
    """Install ``uv.lock`` and the project's entry points into ``.venv``; do nothing when it is up to date.

    With a pack, the machine's own environment, which runs this, is used.
    """
    if PACK is not None:
        return
    lock = (REPO / "uv.lock").read_bytes() + (REPO / "pyproject.toml").read_bytes()
    stamp = REPO / ".venv" / ".synced"
    if stamp.exists() and stamp.read_bytes() == lock:
        return
    run(
        [uv(), "sync", "--frozen", "--all-extras", "--python", sys.executable],
        step="installing the Python environment",
        remedy="It needs 12 GB of disk and a package index; run the command again to continue.",
        env=uv_environment(),
        cwd=REPO,
    )
    stamp.write_bytes(lock)


def uv_environment() -> dict[str, str]:
    """Return the environment of uv calls: one cache, and bytecode compiled before pods mount it read-only."""
    return {
        "UV_CACHE_DIR": str(CACHE / "uv"),
        "UV_COMPILE_BYTECODE": "1",
        "UV_LINK_MODE": "hardlink",
        "VIRTUAL_ENV": "",
        "PATH": os.environ["PATH"],
    }


ORACLES = ("verl==0.9.1", "omegaconf==2.4.0", "codetiming==1.4.0")
PEERS = ("trl==1.16.0", "accelerate==1.12.0")


def oracles() -> Path:
    """Return a folder with other projects' code that tests use as a reference; never a dependency."""
    return _beside("oracles", ORACLES)


def peers() -> Path:
    """Return a folder with other projects' trainers that benchmarks compare with; never a dependency."""
    return _beside("peers", PEERS)


MEGATRON_NEXT = "megatron-core==0.19.2"  # it needs Python 3.12


def megatron_next(python: str) -> Path:
    """Return the Python of an environment as in uv.lock, but with a later Megatron-Core.

    ``python``: a path, or a version for uv to find or download.
    """
    inputs = [(REPO / name).read_bytes() for name in ("uv.lock", "pyproject.toml")]
    home = CACHE / f"megatron-next-{content_key(*inputs, MEGATRON_NEXT.encode(), python.encode())}"
    binary, stamp = home / "bin" / "python", home / ".installed"
    if stamp.exists():
        return binary
    env = uv_environment() | {"UV_PROJECT_ENVIRONMENT": str(home), "UV_COMPILE_BYTECODE": "0"}
    sync = ["sync", "--frozen", "--no-install-project", "--extra", "worker", "--python", python]
    for step, command in (
        (f"installing uv.lock for Python {python}", sync),
        # What it needs is locked for the other version too.
        (f"installing {MEGATRON_NEXT}", ["pip", "install", "--no-deps", "--python", binary, MEGATRON_NEXT]),
    ):
        remedy = "Check that uv reaches a package index, or name a Python 3.12 of yours: NEXT_PYTHON=PATH."
        run([uv(), *command], step=step, remedy=remedy, env=env, cwd=REPO)
    stamp.touch()
    return binary


def _beside(name: str, packages: tuple[str, ...]) -> Path:
    """Install packages without dependencies, because ``.venv`` has what they import; return the folder."""
    target = CACHE / f"{name}-{content_key(' '.join(packages).encode())}"
    if not target.exists():
        temporary = target.with_suffix(".installing")
        shutil.rmtree(temporary, ignore_errors=True)
        install = ["pip", "install", "--no-deps", "--python", sys.executable, "--target", temporary]
        run(
            [uv(), *install, *packages],
            step=f"installing {', '.join(packages)}",
            remedy="Check that pip reaches a package index, then run the command again.",
            env=uv_environment(),
        )
        temporary.rename(target)
    return target
