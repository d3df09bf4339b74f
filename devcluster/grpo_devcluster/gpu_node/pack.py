"""``make gpu-node-pack``: what a machine with GPUs and no network needs for the devcluster, in pieces.

Writes build/gpu-node/archives/, and links to its files in build/gpu-node/call-1/ …: a folder a transfer.
Python packages that jobs need and the machine's environment lacks are those of ``make gpu-node-site``, or of
the folder that GRPO_GPU_NODE_SITE names.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_devcluster.gobuild import GPU_NODE, binary, build_all, module_directory
from grpo_devcluster.gpu_node import archives, debian, thin_images
from grpo_devcluster.gpu_node.pieces import MANIFEST, Manifest, Piece, cut, into_calls
from grpo_devcluster.gpu_node.site_rules import made_folder
from grpo_devcluster.packed import SITE
from grpo_devcluster.paths import PACK, REPO
from grpo_devcluster.stages import StageError, fail, stage

OUTPUT = REPO / "build" / "gpu-node"
JOBS = ("kuberay-operator", "helm")  # what a job needs and a pod does not


def main() -> None:
    """Pack everything and print where the pieces are."""
    try:
        if PACK is not None:
            raise StageError("GRPO_DEVCLUSTER_PACK is set: a pack is made on a machine with a network.")
        manifest = pack(OUTPUT)
    except StageError as error:
        fail(error)
    for call in range(1, manifest.calls + 1):
        pieces = [piece for piece in manifest.pieces if piece.call == call]
        print(f"{OUTPUT}/call-{call}: {sum(p.bytes for p in pieces) / 2**20:.1f} MiB in {len(pieces)} files")


def pack(output: Path) -> Manifest:
    """Build what is missing, write the archives that are new, and distribute all over calls."""
    with stage("Kubernetes, containerd and NVIDIA's components"):
        build_all((*GPU_NODE, *JOBS))
    store = output / "archives"
    store.mkdir(parents=True, exist_ok=True)
    node: dict[str, Callable[[Path], None]] = {name: _binary(name) for name in GPU_NODE}
    node |= {"debian": _debian, "images": lambda tree: thin_images.pack(tree / "images")}
    jobs: dict[str, Callable[[Path], None]] = {name: _binary(name) for name in JOBS}
    jobs["sources"] = _sources
    if folder := _packages():
        jobs[SITE] = _site(folder)
    groups = [[_archive(name, fill, store) for name, fill in group.items()] for group in (node, jobs)]
    manifest = into_calls([piece for pieces in group for piece in pieces] for group in groups)
    _write_calls(manifest, store, output)
    return manifest


def _archive(name: str, fill: Callable[[Path], None], store: Path) -> list[Piece]:
    """Return the pieces of a tree; write those that the store lacks."""
    with stage(f"packing {name}"):
        with _tree(fill) as tree:
            content = archives.tar(tree)
        archive = f"{name}-{archives.key(content)}"
        whole = store / f"{archive}.txz"
        if not whole.exists():
            temporary = whole.with_suffix(".writing")
            temporary.write_bytes(archives.compress(content))
            temporary.rename(whole)
        pieces = []
        for piece, chunk in cut(archive, whole.read_bytes()):
            pieces.append(piece)
            target = store / piece.file
            # An interrupted run leaves a shorter one.
            if not (target.exists() and target.stat().st_size == piece.bytes):
                target.write_bytes(chunk)
        print(f"    {archive}: {len(content) / 1e6:.1f} MB, packed {whole.stat().st_size / 1e6:.1f} MB")
    return pieces


@contextmanager
def _tree(fill: Callable[[Path], None]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        fill(Path(scratch))
        yield Path(scratch)


def _binary(name: str) -> Callable[[Path], None]:
    def fill(tree: Path) -> None:
        source = binary(name)
        for folder in ("bin", "tools"):
            (tree / folder).mkdir()
        shutil.copyfile(source, tree / "bin" / source.name)
        (tree / "bin" / source.name).chmod(0o755)
        (tree / "tools" / name).symlink_to(f"../bin/{source.name}")

    return fill


def _debian(tree: Path) -> None:
    debian.tree_of(debian.NODE, debian.NODE_FILES, debian.NODE_LINKS, tree / "debian", glibc=True)


def _sources(tree: Path) -> None:
    crds = Path("config/crd/bases")
    source = module_directory("kuberay", "github.com/ray-project/kuberay/ray-operator")
    shutil.copytree(source / crds, tree / "sources" / "kuberay" / crds)


def _packages() -> Path | None:
    """Return the folder of Python packages to pack, if there is one."""
    named = os.environ.get("GRPO_GPU_NODE_SITE")
    folder = Path(named) if named else made_folder()
    if folder is None:
        print("    no Python packages of jobs: make gpu-node-site has not made them of the current pins")
    return folder


def _site(folder: Path) -> Callable[[Path], None]:
    if not folder.is_dir():
        raise StageError(
            f"GRPO_GPU_NODE_SITE={folder} is not a folder: name one of Python packages, or unset it."
        )
    if not (folder / "bin" / "ray").exists():  # KubeRay starts it in Ray's pods
        raise StageError(
            f"{folder} has no bin/ray: install ray[default] into it (pip --target), or unset "
            "GRPO_GPU_NODE_SITE and run make gpu-node-site."
        )
    return lambda tree: _copy_site(folder, tree / SITE)


def _copy_site(folder: Path, target: Path) -> None:
    """Copy packages; their scripts run the Python of the machine that they are brought to."""
    archives.copy(folder, target)
    thin_images.run_any_python(target / "bin")


def _write_calls(manifest: Manifest, store: Path, output: Path) -> None:
    for old in output.glob("call-*"):
        shutil.rmtree(old)
    for piece in manifest.pieces:
        folder = output / f"call-{piece.call}"
        folder.mkdir(exist_ok=True)
        (folder / MANIFEST).write_text(manifest.to_json())
        os.link(store / piece.file, folder / piece.file)
    current = {piece.file for piece in manifest.pieces} | {f"{a}.txz" for a in manifest.archives()}
    for file in store.iterdir():
        if file.name not in current:
            file.unlink()


if __name__ == "__main__":
    main()
