"""Builds container images without a registry: a Debian base image, and the project's Dockerfiles on it."""

import shutil
import subprocess
import sys
from pathlib import Path

from grpo_devcluster import driver_stub, nvidia, packed
from grpo_devcluster.node import PAUSE_IMAGE, ctr
from grpo_devcluster.packages import uv, uv_environment
from grpo_devcluster.paths import CACHE, PACK, REPO, RUN, content_key, tree_key
from grpo_devcluster.stages import StageError, run, stage

_SUITE = "bookworm"
_BASE_PACKAGES = "python3,python3-pip,ca-certificates,wget,procps,libgomp1,libnuma1"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SLEEP = "/bin/sleep infinity"  # command of pod sandboxes
_REMEDY = "See setup.log for the whole output; run the command again after fixing the cause."
IMAGES = ("operator", "trainer", "rollout")


def ensure_images() -> dict[str, str]:
    """Build, or take from the pack, and import missing images; return the image references by name."""
    if PACK is not None:
        return _import_packed(PACK)
    wheel = build_wheel()
    stub = "" if nvidia.present() else driver_stub.SOURCE
    base_inputs = (_SUITE, _BASE_PACKAGES, stub, _PATH, _SLEEP)
    base_key = content_key(*(part.encode() for part in base_inputs))
    references = {name: f"localhost/grpo-{name}:{_key(name, wheel, base_key)}" for name in IMAGES}
    have = ctr("images", "list", "-q")[1].split()
    missing = [name for name, reference in references.items() if reference not in have]
    if not missing and PAUSE_IMAGE in have:
        return references
    base = _base_image(base_key)
    with stage(f"building images: {', '.join(missing) or 'pause'}"):
        layout = RUN / "images"
        shutil.rmtree(layout, ignore_errors=True)
        _push(base, layout, PAUSE_IMAGE)
        for name in missing:
            _build(name, base, references[name])
            _push(references[name], layout, references[name])
        _import_layout(layout)
    return references


def _import_packed(pack: Path) -> dict[str, str]:
    references = packed.image_references(pack)
    have = ctr("images", "list", "-q")[1].split()
    if not {PAUSE_IMAGE, *references.values()} <= set(have):
        with stage("importing the packed images"):
            _import(pack / "images" / "images.tar")
    return references


def build_wheel() -> Path:
    """Build the project's wheel in ``dist/``, which the Dockerfiles install, and return its path."""
    key = tree_key(REPO / "operator", REPO / "worker_images", REPO / "pyproject.toml")
    dist = REPO / "dist"
    stamp = dist / ".key"
    if not (stamp.exists() and stamp.read_text() == key):
        shutil.rmtree(dist, ignore_errors=True)
        command = [uv(), "build", "--wheel", "--out-dir", dist, "--python", sys.executable]
        run(command, step="building the wheel", remedy=_REMEDY, env=uv_environment(), cwd=REPO)
        stamp.write_text(key)
    return next(dist.glob("grpo_operator-*.whl"))


def _key(name: str, wheel: Path, base_key: str) -> str:
    key = (wheel.parent / ".key").read_bytes()
    dockerfile = (REPO / f"Dockerfile.{name}").read_bytes()
    packages = (REPO / "images" / f"{name}.txt").read_bytes()
    return content_key(key, dockerfile, base_key.encode(), packages)


def _buildah(*arguments: str | Path, step: str) -> str:
    roots: list[object] = [
        "--root",
        CACHE / "buildah",
        "--runroot",
        RUN / "buildah",
        "--storage-driver",
        "vfs",
    ]
    return run(["buildah", *roots, *arguments], step=step, remedy=_REMEDY)


def _base_image(key: str) -> str:
    """Build a minimal Debian with Python, in place of NGC's and SGLang's images, and return its reference."""
    reference = f"localhost/grpo-base:{key}"
    have = _buildah("images", "--format", "{{.Name}}:{{.Tag}}", step="listing images").split()
    if reference in have:
        return reference
    with stage("bootstrapping the Debian base image"):
        root = CACHE / "base-root"
        shutil.rmtree(root, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", _SUITE, root]
        run(command, step="debootstrap", remedy="Check that a Debian mirror is reachable.")
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
        if not nvidia.present():  # the driver's own library comes by CDI
            driver_stub.build(root / "usr/local/lib/libcuda.so.1")
        subprocess.run(["ldconfig", "-r", str(root)], check=True)
        container = _buildah("from", "scratch", step="base image").strip()
        _buildah("copy", "--quiet", container, f"{root}/.", "/", step="base image")
        _buildah("config", "--env", _PATH, "--cmd", _SLEEP, container, step="base image")
        _buildah("commit", "--quiet", "--rm", container, reference, step="base image")
        shutil.rmtree(root)
    return reference


def _build(name: str, base: str, reference: str) -> None:
    arguments = ["--build-arg", f"BASE_IMAGE={base}"]
    if name == "operator":
        download_operator_wheels()
        arguments += ["--build-arg", "PIP_ARGS=--no-index --find-links=/tmp/dist --break-system-packages"]
    else:  # dependencies come from the host's environment, mounted read-only
        arguments += ["--build-arg", "PIP_ARGS=--no-index", "--build-arg", "REQUIREMENTS=/dev/null"]
    _buildah(
        "bud", "--isolation", "chroot", "--quiet", *arguments,
        "-f", REPO / f"Dockerfile.{name}", "-t", reference, REPO,
        step=f"building the {name} image",
    )  # fmt: skip


def download_operator_wheels() -> None:
    """Download the operator's dependencies as wheels, next to the project's own."""
    pip = uv().parent / "pip"
    packages = REPO / "images" / "operator.txt"
    command = [pip, "download", "-q", "--no-deps", "--require-hashes", "-d", REPO / "dist", "-r", packages]
    run(command, step="downloading the operator's dependencies", remedy=_REMEDY)


def _push(image: str, layout: Path, reference: str) -> None:
    target = f"oci:{layout}:{reference}"
    _buildah("push", "--quiet", "--disable-compression", image, target, step=f"exporting {image}")


def _import_layout(layout: Path) -> None:
    """Import all images into containerd in one archive, because they share the base layer."""
    archive = RUN / "images.tar"
    run(["tar", "-C", layout, "-cf", archive, "."], step="packing the images", remedy=_REMEDY)
    _import(archive)
    archive.unlink()
    shutil.rmtree(layout)


def _import(archive: Path) -> None:
    code, output = ctr("images", "import", "--all-platforms", str(archive))
    if code:
        raise StageError(f"importing the images failed: {output}\n{_REMEDY}")


def environment() -> Path:
    """Return the folder of the Python environment, which ``.venv`` may link to; its scripts name it."""
    return Path(sys.prefix) if PACK else (REPO / ".venv").resolve()


def environment_mounts() -> list[Path]:
    """Return the host folders of the Python environment, which pods mount read-only."""
    if PACK is not None:  # the images have no Python, so that pods need the machine's libraries too
        return packed.host_mounts(Path(sys.prefix), Path(sys.base_prefix), Path("/"))
    base = Path(sys.base_prefix)  # also right when this runs inside the environment itself
    mounts = [environment()]
    return mounts if base == Path("/usr") else [*mounts, base]
