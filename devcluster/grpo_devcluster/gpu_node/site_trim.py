"""Removes from an installed folder of Python packages what jobs on the machine never read."""

import csv
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from grpo_devcluster.gpu_node import fatbin
from grpo_devcluster.gpu_node.site_rules import Rules
from grpo_devcluster.gpu_node.thin_images import run_any_python
from grpo_devcluster.stages import StageError, run

_OF_THIS_MACHINE = ("direct_url.json", "uv_cache.json")  # they have paths of this machine
_SMALLEST = 200_000  # bytes of a library that is worth stripping


def trim(folder: Path, rules: Rules) -> None:
    """Drop files, strip debug symbols, and blank GPU code of other architectures."""
    drop(folder, rules.dropped)
    for name in _OF_THIS_MACHINE:
        for file in folder.glob(f"*.dist-info/{name}"):
            file.unlink()
    for record in folder.glob("*.dist-info/RECORD"):
        record.write_text(plain_record(record.read_text(), folder))
    run_any_python(folder / "bin")
    for library in stripped(folder, rules.unstripped):
        command = ["strip", "--strip-unneeded", library]
        run(command, step=f"stripping {library.name}", remedy="Install binutils.")
    for name in rules.pruned:
        if (folder / name).exists():
            blanked = fatbin.prune(folder / name, rules.architecture)
            print(f"    {name}: {blanked / 1e6:.0f} MB of GPU code for other GPUs are blank")


def plain_record(record: str, folder: Path) -> str:
    """Return the RECORD of a package with the files that are left, without their digests and sizes.

    Packages find their libraries by it. Digests are of the files before they changed here.
    """
    paths = sorted(row[0] for row in csv.reader(record.splitlines()) if row)
    return "".join(f"{path},,\n" for path in paths if "," not in path and (folder / path).exists())


def drop(folder: Path, patterns: Sequence[str]) -> None:
    """Remove files and folders. Raises StageError at a pattern that fits none, which is out of date."""
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if not found:
            raise StageError(f"nothing in the packages fits {pattern!r}: correct gpu-node-site.toml.")
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def stripped(folder: Path, unstripped: Sequence[str]) -> list[Path]:
    """Return the ELF files that lose their symbols."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.stat().st_size > _SMALLEST
        and not any(fnmatch(str(path.relative_to(folder)), pattern) for pattern in unstripped)
        and _is_elf(path)
    ]


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
