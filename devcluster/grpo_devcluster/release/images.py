"""``python -m grpo_devcluster.release.images``: build the images for a registry, and push them.

A pushed image's digest is kept in ``dist/images/NAME.digest``, from where the chart's values get it.
"""

import argparse
import re
from pathlib import Path

from grpo_devcluster.images import IMAGES, build_wheel
from grpo_devcluster.paths import REPO
from grpo_devcluster.release.version import current
from grpo_devcluster.stages import StageError, fail, run, stage

DIGESTS = REPO / "dist" / "images"
BUILDERS = ("docker", "podman", "buildah")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def reference(registry: str, name: str, version: str) -> str:
    """Return an image's name and tag below ``registry``, which has a host and usually a path."""
    return f"{registry}/{name}:{version}"


def build(builder: str, name: str, reference: str) -> None:
    """Build one image from its Dockerfile; the wheel must be in ``dist/``."""
    run(
        [builder, "build", "-f", REPO / f"Dockerfile.{name}", "-t", reference, REPO],
        step=f"building {reference}",
        remedy=f"BUILDER names the program: {', '.join(BUILDERS)}. The base image must be reachable.",
    )


def push(
    builder: str, name: str, reference: str, digests: Path = DIGESTS, *, plain_http: bool = False
) -> str:
    """Push one image and return its digest, which is also written to ``digests``."""
    digests.mkdir(parents=True, exist_ok=True)
    file = digests / f"{name}.digest"
    insecure = ["--tls-verify=false"] if plain_http else []
    run(
        [builder, "push", "--digestfile", file, *insecure, reference],
        step=f"pushing {reference}",
        remedy=f"Log in to the registry first ({builder} login).",
    )
    return digest(file)


def digest(file: Path) -> str:
    """Return the digest in a file. Raises StageError if there is none."""
    text = file.read_text().strip() if file.is_file() else ""
    if not _DIGEST.fullmatch(text):
        raise StageError(f"{file} has no digest of an image: run `make publish-images` first")
    return text


def main() -> None:
    """Build the images, and push them if asked."""
    parser = argparse.ArgumentParser(prog="make images")
    parser.add_argument("registry", help="host and path, as in registry.example.com/team")
    parser.add_argument("--builder", choices=BUILDERS, default="docker")
    parser.add_argument("--push", action="store_true")
    chosen = parser.parse_args()
    if chosen.push and chosen.builder == "docker":
        parser.error(
            "BUILDER is docker, which writes no digests: push with BUILDER=buildah or BUILDER=podman"
        )
    try:
        build_wheel()
        for name in IMAGES:
            target = reference(chosen.registry, name, current())
            with stage(target):
                build(chosen.builder, name, target)
                if chosen.push:
                    print(push(chosen.builder, name, target))
    except StageError as error:
        fail(error)


if __name__ == "__main__":
    main()
