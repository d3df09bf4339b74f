"""Unpacks the pieces that have been brought so far, after each call or once after the last.

Needs nothing but Python's standard library: ``python -m grpo_devcluster.gpu_node.unpack RECEIVED TARGET``.
"""

import compileall
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_devcluster.gpu_node import archives
from grpo_devcluster.gpu_node.pieces import MANIFEST, Manifest, check
from grpo_devcluster.packed import SITE
from grpo_devcluster.stages import StageError, fail, stage

_DONE = ".unpacked"
INCOMPLETE = 3  # exit code


def main() -> None:
    """Unpack; exit with code 3 and the numbers of the calls that are missing, if any."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m grpo_devcluster.gpu_node.unpack RECEIVED TARGET")
    try:
        with stage("unpacking"):
            missing = unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    except StageError as error:
        fail(error)
    if missing:
        print(f"Not here yet: call {', '.join(map(str, missing))}.")
        sys.exit(INCOMPLETE)


def unpack(received: Path, target: Path) -> list[int]:
    """Unpack the archives of which all parts are below ``received``; return the calls that are missing."""
    manifest = _manifest(received)
    (target / _DONE).mkdir(parents=True, exist_ok=True)
    waiting = {
        name: parts for name, parts in manifest.archives().items() if not _stamp(target, name).exists()
    }
    missing: set[int] = set()
    complete = {}
    for name, parts in waiting.items():
        files = {piece: received / f"call-{piece.call}" / piece.file for piece in parts}
        absent = {piece.call for piece, file in files.items() if not check(piece, file)}
        missing |= absent
        if not absent:
            complete[name] = [files[piece] for piece in parts]
    with ThreadPoolExecutor() as pool:  # xz decompresses outside Python's lock
        list(pool.map(lambda name: _extract(name, complete[name], target), complete))
    if any(name.startswith(f"{SITE}-") for name in complete):
        # Pods mount the packages read-only, and without bytecode each of their processes compiles them again.
        for folder in (target / SITE, Path(sysconfig.get_path("purelib"))):
            compileall.compile_dir(folder, quiet=2, workers=0)
    return sorted(missing)


def _manifest(received: Path) -> Manifest:
    texts = {path: path.read_text() for path in sorted(received.glob(f"call-*/{MANIFEST}"))}
    if not texts:
        raise StageError(f"{received} has no call-*/{MANIFEST}: bring build/gpu-node/call-1 first.")
    if len(set(texts.values())) > 1:
        folders = ", ".join(str(path.parent) for path in texts)
        raise StageError(f"{folders} are of different packs. Remove the folders of the older pack.")
    return Manifest.from_json(next(iter(texts.values())))


def _stamp(target: Path, archive: str) -> Path:
    return target / _DONE / archive


def _extract(name: str, files: list[Path], target: Path) -> None:
    archives.extract(b"".join(file.read_bytes() for file in files), target)
    _stamp(target, name).touch()


if __name__ == "__main__":
    main()
