"""``python -m grpo_devcluster.release.chart``: package the chart, and push it to an OCI registry.

A package for a registry has the names of its images as defaults, with their digests
once they have been pushed. A released one names its repository, too.
"""

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

from grpo_devcluster.gobuild import binary, build_all
from grpo_devcluster.images import IMAGES
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO
from grpo_devcluster.reference.helm import chart_readme
from grpo_devcluster.release.images import DIGESTS, digest, reference
from grpo_devcluster.release.version import current
from grpo_devcluster.stages import StageError, fail, run

DIST = REPO / "dist" / "chart"
ICON = "docs/images/icon.svg"


def package(target: Path = DIST, registry: str = "", digests: Path | None = None, source: str = "") -> Path:
    """Write the chart's package to the folder ``target`` and return its path.

    ``registry``: where its images are, "" for the defaults in values.yaml. ``digests``: a folder with a file
    NAME.digest for each image, None to name images by tag. ``source``: see ``name_source``, "" for none.
    Raises StageError if a file has no digest.
    """
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(shutil.copytree(CHART, Path(folder) / CHART.name))
        if registry:
            _name_images(chart, registry, digests)
            (chart / "README.md").write_text(chart_readme(chart))
        if source:
            name_source(chart / "Chart.yaml", source)
        command = [binary("helm"), "package", chart, "--destination", target]
        run(command, step="packaging the chart", remedy="See the messages of helm above.")
    return target / f"{CHART.name}-{current()}.tgz"


def push(file: Path, registry: str, *, plain_http: bool = False) -> None:
    """Push a package to ``oci://REGISTRY/grpo-operator``, with its version as the tag."""
    insecure = ["--plain-http"] if plain_http else []
    command = [binary("helm"), "push", file, f"oci://{registry}", *insecure]
    remedy = "Log in to the registry first (helm registry login)."
    print(run(command, step=f"pushing {file.name}", remedy=remedy), end="")


def name_source(metadata: Path, source: str) -> None:
    """Write home, sources and icon into a Chart.yaml.

    ``source``: address of the repository that has the version's tag, without a slash at its end.
    """
    about = {"home": source, "sources": [source], "icon": f"{source}/raw/v{current()}/{ICON}"}
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in about.items()]
    metadata.write_text("".join(lines) + metadata.read_text())


def _name_images(chart: Path, registry: str, digests: Path | None) -> None:
    """Write the images' names into the values and, for Artifact Hub, into the metadata."""
    digest_of = {name: digest(digests / f"{name}.digest") if digests else "" for name in IMAGES}
    pinned = {
        name: reference(registry, name, current()) + (f"@{found}" if found else "")
        for name, found in digest_of.items()
    }
    values = chart / "values.yaml"
    _replace(values, "  repository: ", f"{registry}/operator")
    _replace(values, "  digest: ", f'"{digest_of["operator"]}"')
    for name in ("trainer", "rollout"):
        _replace(values, f"  {name}: ", pinned[name])
    listed = "".join(f"    - name: {name}\n      image: {image}\n" for name, image in pinned.items())
    with (chart / "Chart.yaml").open("a") as metadata:  # it ends with the annotations
        metadata.write(f"  artifacthub.io/images: |\n{listed}")


def _replace(file: Path, key: str, value: str) -> None:
    text, count = re.subn(f"^{key}.*$", key + value, file.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise StageError(f"{file.name} of the chart has {count} lines {key.strip()!r}: it must have one")
    file.write_text(text)


def main() -> None:
    """Package the chart, and push it if asked."""
    parser = argparse.ArgumentParser(prog="make chart")
    parser.add_argument(
        "registry", nargs="?", default="", help="host and path, as in registry.example.com/team"
    )
    parser.add_argument("--digests", type=Path, help=f"folder with the images' digests, as in {DIGESTS}")
    parser.add_argument("--source", default="", help="address of the repository that has the version's tag")
    parser.add_argument("--push", action="store_true")
    chosen = parser.parse_args()
    registry = chosen.registry.removeprefix("oci://").rstrip("/")
    if chosen.push and not registry:
        parser.error("REGISTRY is not set: where should the chart go?")
    try:
        build_all(("helm",))
        file = package(registry=registry, digests=chosen.digests, source=chosen.source.rstrip("/"))
        print(file.relative_to(REPO))
        if chosen.push:
            push(file, registry)
    except StageError as error:
        fail(error)


if __name__ == "__main__":
    main()
