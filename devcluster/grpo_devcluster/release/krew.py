"""``python -m grpo_devcluster.release.krew URL``: package ``kubectl grpo`` for krew.

Writes an archive for each platform and ``grpo.yaml``, the manifest that names them below URL with their
digests. An archive has the command's locked packages with the compiled modules of every Python that the
project supports, so that it needs a Python and nothing else.
"""

import argparse
import gzip
import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from grpo_devcluster.images import build_wheel
from grpo_devcluster.packages import uv, uv_environment
from grpo_devcluster.paths import REPO
from grpo_devcluster.release.version import current
from grpo_devcluster.stages import StageError, fail, run

DIST = REPO / "dist" / "krew"
NAME, COMMAND = "grpo", "kubectl-grpo"
PYTHONS = ("3.12", "3.11")  # preferred first
_REMEDY = "Check that uv reaches a package index, then run the command again."
_SHORT = "Plan, watch, profile and export GRPO post-training jobs"
_DESCRIPTION = (
    "Works with GRPOJobs of grpo-operator: status, logs and samples of a job, plans of manifests that are not"
    " applied yet, profiles of its pods, and exports of its checkpoints. It reads your kubeconfig as kubectl"
    " does."
)
_CAVEATS = f"It needs Python {' or '.join(reversed(PYTHONS))} on PATH."


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform by Kubernetes' names. ``wheels``: uv's name for the wheels that run there."""

    os: str
    arch: str
    wheels: str

    @property
    def archive(self) -> str:
        return f"{COMMAND}-{self.os}-{self.arch}.tar.gz"


PLATFORMS = (
    Platform("linux", "amd64", "x86_64-manylinux_2_28"),
    Platform("linux", "arm64", "aarch64-manylinux_2_28"),
    Platform("darwin", "amd64", "x86_64-apple-darwin"),
    Platform("darwin", "arm64", "aarch64-apple-darwin"),
)


def package(platforms: Iterable[Platform], url: str, target: Path = DIST) -> Path:
    """Write archives and manifest to ``target``; return the manifest's path.

    ``url``: where the archives will be. Raises StageError if it is not of HTTPS.
    """
    if not url.startswith("https://"):
        raise StageError(f"URL is {url!r}: krew fetches archives by HTTPS only, give https://...")
    target.mkdir(parents=True, exist_ok=True)
    wheel, locked = build_wheel(), _locked()
    entries = []
    for platform in platforms:
        file = target / platform.archive
        with tempfile.TemporaryDirectory() as folder:
            write_archive(_plugin(Path(folder) / "plugin", platform, wheel, locked), file)
        entries.append(_entry(platform, f"{url.rstrip('/')}/{file.name}", file))
    manifest = target / f"{NAME}.yaml"
    manifest.write_text(yaml.safe_dump(_manifest(entries), sort_keys=False))
    return manifest


def launcher() -> str:
    """Return the shell script that runs the command with the first Python that it finds."""
    versions = ", ".join(f"({version.replace('.', ', ')})" for version in PYTHONS)
    names = " ".join([*(f"python{version}" for version in PYTHONS), "python3"])
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        "from grpo_operator.cli.kubectl.main import main; main()"
    )
    return f"""\
#!/bin/sh
# Runs kubectl grpo with the packages beside this file.
packages=$(dirname "$(readlink -f "$0")")/packages
for python in {names}; do
  if "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ({versions}))' 2>/dev/null; then
    exec "$python" -I -c '{program}' "$packages" "$@"
  fi
done
echo "kubectl grpo needs Python {" or ".join(reversed(PYTHONS))}: none of {names} on PATH is one" >&2
exit 1
"""


def write_archive(folder: Path, file: Path) -> None:
    """Write the files below ``folder`` to a tar.gz whose bytes depend on them alone."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with (
        file.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False, filter=plain)


def _plugin(folder: Path, platform: Platform, wheel: Path, locked: Path) -> Path:
    """Fill ``folder`` with what an archive has; return it."""
    packages = folder / "packages"
    for python in PYTHONS:  # their compiled modules have other names, and all else is the same
        with tempfile.TemporaryDirectory() as target:
            command = [
                *(uv(), "pip", "install", "--target", target, "--require-hashes", "--no-deps"),
                *("--only-binary", ":all:", "--requirement", locked),
                *("--python-platform", platform.wheels, "--python-version", python),
            ]
            environment = uv_environment() | {"UV_COMPILE_BYTECODE": "0"}
            step = f"packages of {COMMAND} for {platform.os}/{platform.arch}, Python {python}"
            run(command, step=step, remedy=_REMEDY, env=environment)
            shutil.rmtree(Path(target) / "bin", ignore_errors=True)
            (Path(target) / ".lock").unlink(missing_ok=True)
            shutil.copytree(target, packages, dirs_exist_ok=True)
    shutil.unpack_archive(wheel, packages, "zip")
    script = folder / COMMAND
    script.write_text(launcher())
    script.chmod(0o755)
    shutil.copy(REPO / "LICENSE", folder)
    return folder


def _locked() -> Path:
    """Return a file with the locked packages that the command needs, and their digests."""
    file = REPO / "build" / "krew.txt"
    file.parent.mkdir(exist_ok=True)
    command = [
        *(uv(), "export", "--frozen", "--no-dev", "--extra", "cli", "--no-emit-project", "--quiet"),
        *("--output-file", file),
    ]
    run(command, step="locked packages of kubectl grpo", remedy=_REMEDY, env=uv_environment(), cwd=REPO)
    return file


def _entry(platform: Platform, uri: str, file: Path) -> dict[str, object]:
    return {
        "selector": {"matchLabels": {"os": platform.os, "arch": platform.arch}},
        "uri": uri,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "bin": COMMAND,
    }


def _manifest(platforms: list[dict[str, object]]) -> dict[str, object]:
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": NAME},
        "spec": {
            "version": f"v{current()}",
            "shortDescription": _SHORT,
            "description": _DESCRIPTION,
            "caveats": _CAVEATS,
            "platforms": platforms,
        },
    }


def main() -> None:
    """Package all platforms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", metavar="URL", help="where the archives will be, for example of a release")
    try:
        print(package(PLATFORMS, parser.parse_args().url))
    except StageError as error:
        fail(error)


if __name__ == "__main__":
    main()
