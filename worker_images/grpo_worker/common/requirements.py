"""Checks, when an image is built, that its base and its own packages meet all requirements.

The packages are installed without their dependencies (``images/*.txt``), so nothing else would notice a base
that lacks one or has another version. Usage: ``python3 -m grpo_worker.common.requirements EXTRAS FOLDER...``
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = "grpo-operator"


def unmet(
    packages: Iterable[metadata.Distribution], extras: Iterable[str], versions: Mapping[str, str]
) -> list[str]:
    """Return a sentence for each requirement of ``packages`` that ``versions`` does not meet.

    ``extras``: of the project. ``versions``: of all distributions that Python finds, by canonical name.
    """
    problems = set[str]()
    for package in packages:
        name = canonicalize_name(package.metadata["Name"])
        for requirement in _requirements(package, list(extras) if name == PROJECT else []):
            needed = canonicalize_name(requirement.name)
            problem = _problem(requirement, versions.get(needed))
            if problem:
                problems.add(
                    f"{name} {package.version} needs {requirement.name}{requirement.specifier}, {problem}"
                )
    return sorted(problems)


def _requirements(package: metadata.Distribution, extras: list[str]) -> Iterator[Requirement]:
    for text in package.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ["", *extras]):
            yield requirement


def _problem(requirement: Requirement, found: str | None) -> str:
    if found is None:
        return "which is not installed"
    if requirement.name == "torch" and same_minor(str(requirement.specifier), found):
        return ""  # bases bring builds of their own, such as 2.14.0a0+HASH for 2.14
    fits = requirement.specifier.contains(Version(found), prereleases=True)
    return "" if fits else f"but {found} is installed"


def same_minor(specifier: str, found: str) -> bool:
    """Return whether a specifier pins (``==``) a version whose first two numbers are those of ``found``."""
    pinned = specifier.removeprefix("==")
    if pinned == specifier or "," in pinned or "*" in pinned:
        return False
    return Version(pinned).release[:2] == Version(found).release[:2]


def main() -> None:
    """Check the packages of the folders that the arguments name; exit with what is not met."""
    extras, folders = sys.argv[1].split(","), sys.argv[2:]
    versions = dict[str, str]()
    for found in metadata.distributions():
        if found.metadata["Name"]:  # folders of removed packages have none
            versions.setdefault(canonicalize_name(found.metadata["Name"]), found.version)
    problems = unmet(metadata.distributions(path=folders), extras, versions)
    if problems:
        sys.exit(
            "\n".join([*problems, "Build on the base that images/bases.yaml names, or change that file."])
        )


if __name__ == "__main__":
    main()
