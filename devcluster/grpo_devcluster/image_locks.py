"""Writes each image's locked packages, ``images/NAME.txt``, from ``uv.lock`` and ``images/bases.yaml``."""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

from grpo_devcluster.paths import REPO

PROJECT = "grpo-operator"
BASES = Path("images/bases.yaml")
MACHINES = ("x86_64", "aarch64")
Requirement = tuple[str, str]  # name of a distribution, and one of its extras or ""


@dataclass(frozen=True, slots=True)
class Base:
    """The base of an image; see the fields of ``images/bases.yaml``."""

    name: str
    image: str
    python: str
    extras: tuple[str, ...]
    provides: tuple[str, ...]
    provides_closure: tuple[str, ...]
    packages: dict[str, dict[str, Any]]

    def has(self, distribution: str) -> bool:
        """Return whether the base is named to have a distribution."""
        return any(fnmatch(distribution, pattern) for pattern in self.provides)


def read_bases(repository: Path = REPO) -> dict[str, Base]:
    """Return the base of each image by the image's name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((repository / BASES).read_text())
    return {
        name: Base(
            name, base["image"], base["python"], tuple(base["extras"]), tuple(base["provides"]),
            tuple(base.get("provides_closure", ())), base["packages"],
        )
        for name, base in found.items()
    }  # fmt: skip


class Lock:
    """The packages of ``uv.lock`` for one version of Python on Linux."""

    def __init__(self, text: str, python: str) -> None:
        self._packages: dict[str, list[dict[str, Any]]] = {}
        for package in tomllib.loads(text)["package"]:
            self._packages.setdefault(package["name"], []).append(package)
        self._python = python

    def closure(self, roots: Iterable[Requirement], base: Base | None = None) -> set[str]:
        """Return the names of ``roots`` and of all that they need, without what ``base`` is named to have.

        What such a distribution needs is the base's affair too.
        """
        seen: set[Requirement] = set()
        pending = list(roots)
        while pending:
            requirement = pending.pop()
            if requirement in seen or (base is not None and base.has(requirement[0])):
                continue
            seen.add(requirement)
            pending += self._needs(requirement)
        return {name for name, _ in seen}

    def package(self, name: str) -> dict[str, Any]:
        """Return the entry of a distribution. Raises LookupError if this Python has none or several."""
        found = [p for p in self._packages.get(name, ()) if self._here(p.get("resolution-markers"))]
        if len(found) != 1:
            raise LookupError(f"uv.lock has {len(found)} entries of {name} for Python {self._python}, not 1")
        return found[0]

    def hashes(self, name: str) -> list[str]:
        """Return the hashes of a distribution's wheels for this Python, or of its source if it has none."""
        package = self.package(name)
        wheels = [w for w in package.get("wheels", ()) if self._fits(w["url"].rsplit("/", 1)[1])]
        files = wheels or [package["sdist"]]
        return sorted(str(file["hash"]) for file in files)

    def _needs(self, requirement: Requirement) -> Iterator[Requirement]:
        name, extra = requirement
        package = self.package(name)
        needed = package.get("dependencies", ())
        if extra:
            yield name, ""
            needed = package["optional-dependencies"][extra]
        for other in needed:
            if self._here([other["marker"]] if "marker" in other else None):
                yield other["name"], ""
                yield from ((other["name"], wanted) for wanted in other.get("extra", ()))

    def _here(self, markers: list[str] | None) -> bool:
        """Return whether one of the markers is true on a machine of the images; no markers are true."""
        return markers is None or any(
            Marker(marker).evaluate(self._environment(machine)) for marker in markers for machine in MACHINES
        )

    def _environment(self, machine: str) -> dict[str, str]:
        return {
            "python_version": self._python,
            "python_full_version": f"{self._python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "platform_machine": machine,
            "sys_platform": "linux",
            "os_name": "posix",
            "extra": "",
        }

    def _fits(self, wheel: str) -> bool:
        """Return whether a wheel is for this Python on glibc."""
        short = self._python.replace(".", "")
        return any(_interpreter_fits(t.interpreter, t.abi, short) and _platform_fits(t.platform)
                   for t in parse_wheel_filename(wheel)[3])  # fmt: skip


def _interpreter_fits(interpreter: str, abi: str, short: str) -> bool:
    if abi == "abi3" and interpreter.startswith("cp3"):
        return int(interpreter[2:]) <= int(short)
    if interpreter == f"cp{short}":
        return abi in (f"cp{short}", "none")
    return abi == "none" and interpreter in ("py3", "py2.py3", f"py{short}")


def _platform_fits(platform: str) -> bool:
    return platform == "any" or (platform.startswith(("manylinux", "linux")) and platform.endswith(MACHINES))


def installed(base: Base, lock: Lock) -> list[str]:
    """Return the names of the distributions that an image installs beside the project's wheel."""
    roots = [(PROJECT, extra) for extra in base.extras] or [(PROJECT, "")]
    brought = lock.closure((name, "") for name in base.provides_closure)
    return sorted(lock.closure(roots, base) - brought - {PROJECT})


def render(base: Base, lock: Lock) -> str:
    """Return the text of an image's list, in the form of pip's requirements files with hashes."""
    lines = [
        f"# What {base.image} lacks, for Python {base.python}. Written by `make image-locks`; do not edit.",
    ]
    for name in installed(base, lock):
        hashes = [f"    --hash={value}" for value in lock.hashes(name)]
        lines.append(" \\\n".join([f"{name}=={lock.package(name)['version']}", *hashes]))
    return "\n".join(lines) + "\n"


def texts(repository: Path = REPO) -> dict[Path, str]:
    """Return the text of each list by its path in the repository."""
    lock = (repository / "uv.lock").read_text()
    return {
        Path(f"images/{name}.txt"): render(base, Lock(lock, base.python))
        for name, base in read_bases(repository).items()
    }


def main() -> None:
    """Write the lists of all images."""
    for path, text in texts().items():
        (REPO / path).write_text(text)
        sys.stdout.write(f"{path}: {text.count('==')} packages\n")


if __name__ == "__main__":
    main()
