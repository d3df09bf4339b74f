"""Images for a machine without a network; those whose pods mount the machine's environment have no Python."""

import json
import shutil
import tempfile
from pathlib import Path

from grpo_devcluster.gpu_node import archives, debian, oci
from grpo_devcluster.images import IMAGES, build_wheel, download_operator_wheels
from grpo_devcluster.node import PAUSE_IMAGE
from grpo_devcluster.packages import uv
from grpo_devcluster.paths import REPO, content_key
from grpo_devcluster.stages import run

_FOLDERS = (
    *("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/libexec", "usr/include", "usr/share"),
    *("usr/local/bin", "etc", "proc", "sys", "dev", "run", "var/run", "opt", "root", "home", "tmp"),
)
_MERGED = ("bin", "sbin", "lib", "lib64")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "group": "root:x:0:\n",
    "nsswitch.conf": "hosts: files dns\n",
    "ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
    "debian_version": "12\n",  # by its presence NVIDIA's hook knows where libraries are
}
_PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_SLEEP = ["/usr/bin/busybox", "sleep", "infinity"]  # command of pod sandboxes
_PIP = ("install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target")


def pack(target: Path) -> None:
    """Write the archive of all images and their references into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        layers = _layers(Path(scratch))
    images = {PAUSE_IMAGE: oci.Image([layers["base"]], {"Cmd": _SLEEP, "Env": ["PATH=/usr/bin"]})}
    references = {}
    for name in IMAGES:
        settings = oci.dockerfile_settings((REPO / f"Dockerfile.{name}").read_text(), _PATH)
        own = (layers["python"], layers["operator"]) if name == "operator" else (layers["project"],)
        image = oci.Image([layers["base"], *own], settings)
        references[name] = f"localhost/grpo-{name}:{content_key(image.config())}"
        images[references[name]] = image
    target.mkdir(parents=True)
    (target / "images.tar").write_bytes(oci.archive(images))
    (target / "references.json").write_text(json.dumps(references, indent=1) + "\n")


def _layers(scratch: Path) -> dict[str, bytes]:
    for name in ("base", "python", "operator", "project"):
        (scratch / name).mkdir()
    _base(scratch / "base")
    debian.tree_of(debian.PYTHON, debian.PYTHON_FILES, debian.PYTHON_LINKS, scratch / "python", glibc=False)
    wheel = build_wheel()
    download_operator_wheels()
    _install([wheel], scratch / "project" / "opt" / "grpo-operator")
    shutil.copytree(scratch / "project" / "opt", scratch / "operator" / "opt")
    others = sorted(path for path in wheel.parent.glob("*.whl") if path != wheel)
    _install(others, scratch / "operator" / "opt" / "grpo-packages")
    return {path.name: archives.tar(path) for path in scratch.iterdir()}


def _base(tree: Path) -> None:
    """Make a root with nothing but folders to mount on, a few files of /etc, and busybox for sandboxes."""
    for folder in _FOLDERS:
        (tree / folder).mkdir(parents=True, exist_ok=True)
    (tree / "tmp").chmod(0o1777)
    for name in _MERGED:
        (tree / name).symlink_to(f"usr/{name}")
    for name, text in _ETC.items():
        (tree / "etc" / name).write_text(text)
    debian.tree_of(("busybox-static",), ("usr/bin/busybox",), {}, tree, glibc=False)
    for name in ("sh", "sleep"):
        (tree / "usr/bin" / name).symlink_to("busybox")


def _install(wheels: list[Path], target: Path) -> None:
    """Install wheels into a folder as the Dockerfiles do; its scripts run the image's Python."""
    command = [uv().parent / "pip", *_PIP, target, *wheels]
    run(command, step=f"installing {wheels[0].name}", remedy="Remove dist/ and run the command again.")
    run_any_python(target / "bin")
    # They have paths of this machine, or digests of files with such paths.
    for name in ("direct_url.json", "RECORD"):
        for file in target.glob(f"*.dist-info/{name}"):
            file.unlink()


def run_any_python(scripts: Path) -> None:
    """Let Python scripts run the Python that is first on PATH; programs stay as they are."""
    for script in scripts.glob("*"):
        first, separator, body = script.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            script.write_bytes(b"#!/usr/bin/env python3" + separator + body)
