"""Writes a software bill of materials of each image, ``dist/sbom/IMAGE.cdx.json``, in CycloneDX's format 1.6.

Listed are the locked packages that the image installs, with their hashes and licences, the project's wheel,
and the base image, whose own packages are its publisher's affair. The same commit makes the same bytes.
"""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from grpo_devcluster.image_locks import PROJECT, Base, Lock, installed, read_bases
from grpo_devcluster.paths import REPO
from grpo_devcluster.release.version import current

FOLDER = REPO / "dist/sbom"
FORMAT = SchemaVersion.V1_6
_NAMESPACE = uuid.UUID("6f7f5c1e-0f0b-4c3c-9c5e-5a1d8f6f3a10")  # of the serial numbers of these documents
_OTHER_VERSION = "grpo:licence-of-version"  # property: the licence was read from another version


def bill(base: Base, lock: Lock, version: str, commit: str, made: datetime) -> str:
    """Return the document of one image. ``version``: the project's. ``made``: time of the commit."""
    image = Component(name=f"{PROJECT}/{base.name}", version=version, type=ComponentType.CONTAINER)
    image.bom_ref.value = f"image:{base.name}"
    wheel = _package(PROJECT, version, [])
    parts = [wheel, _base(base)]
    parts += [
        _package(name, lock.package(name)["version"], lock.hashes(name)) for name in installed(base, lock)
    ]
    bom = Bom(components=parts, serial_number=uuid.uuid5(_NAMESPACE, f"{commit} {base.name}"))
    bom.metadata.component, bom.metadata.timestamp = image, made
    bom.metadata.properties.add(Property(name="grpo:commit", value=commit))
    bom.register_dependency(image, parts)
    return make_outputter(bom, OutputFormat.JSON, FORMAT).output_as_string(indent=1) + "\n"


def licences(name: str) -> tuple[str, ...]:
    """Return the licences that an installed distribution names: an SPDX expression, or names.

    Raises metadata.PackageNotFoundError if it is not installed.
    """
    found = metadata.metadata(name)
    if "License-Expression" in found:
        return (found["License-Expression"],)
    classified = tuple(
        text.rsplit(" :: ", 1)[1]
        for text in found.get_all("Classifier", [])
        if text.startswith("License :: ") and text != "License :: OSI Approved"
    )
    lines = found["License"].split("\n") if "License" in found else []
    return classified or tuple(line.strip() for line in lines[:1] if line.strip())


def _package(name: str, version: str, hashes: list[str]) -> Component:
    component = Component(
        name=name,
        version=version,
        purl=PackageURL("pypi", None, name, version),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=text.removeprefix("sha256:")) for text in hashes],
        licenses=_licences(name),
    )
    component.bom_ref.value = f"{name}@{version}"
    here = _installed_version(name)
    if component.licenses and here not in (version, None):
        component.properties.add(Property(name=_OTHER_VERSION, value=here))
    return component


def _licences(name: str) -> list[License]:
    factory = LicenseFactory()
    try:
        texts = licences(name)
    except metadata.PackageNotFoundError:
        return []
    if len(texts) == 1:
        return [factory.make_from_string(texts[0])]
    return [DisjunctiveLicense(name=text) for text in texts]


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _base(base: Base) -> Component:
    name, _, tag = base.image.rpartition(":")
    component = Component(
        name=name,
        version=tag,
        type=ComponentType.CONTAINER,
        description="base image, with packages of its own",
    )
    component.bom_ref.value = f"base:{base.image}"
    return component


def bills(repository: Path = REPO) -> Iterator[tuple[str, str]]:
    """Yield the name and the document of each image of the checked out commit."""
    lock = (repository / "uv.lock").read_text()
    version = current(repository)
    commit, seconds = _git(repository, "log", "-1", "--format=%H %ct").split()
    made = datetime.fromtimestamp(int(seconds), UTC)
    for name, base in read_bases(repository).items():
        yield name, bill(base, Lock(lock, base.python), version, commit, made)


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the documents of all images."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in bills():
        path = FOLDER / f"{name}.cdx.json"
        path.write_text(text)
        sys.stdout.write(f"{path.relative_to(REPO)}\n")


if __name__ == "__main__":
    main()
