"""Image archives made without a container engine: layers from folders, settings from a Dockerfile."""

import hashlib
import io
import json
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True, slots=True)
class Image:
    """An image: its layers as tar archives, and settings as in the ``config`` of an OCI image."""

    layers: Sequence[bytes]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> bytes:
        """Return the image's configuration, whose digest is the image's identity."""
        layers = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in self.layers]
        content = {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(self.settings),
            "rootfs": {"type": "layers", "diff_ids": layers},
        }
        return _json(content)


def dockerfile_settings(text: str, inherited: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that ENV, USER, ENTRYPOINT and CMD make on a base with variables ``inherited``."""
    environment, settings = dict(inherited), {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "ENV":
            environment |= _assignments(rest, environment)
        elif instruction == "USER":
            settings["User"] = rest.strip()
        elif instruction in ("ENTRYPOINT", "CMD"):
            settings[instruction.capitalize()] = json.loads(rest)
    return {"Env": [f"{name}={value}" for name, value in environment.items()], **settings}


def _assignments(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ENV instruction, which sees the variables before it."""
    pairs = (assignment.partition("=") for assignment in shlex.split(text))
    return {
        name: re.sub(r"\$\{(\w+)\}", lambda match: environment.get(match[1], ""), value)
        for name, _, value in pairs
    }


def archive(images: Mapping[str, Image]) -> bytes:
    """Return an archive in OCI layout of images by reference; layers that images share are in it once."""
    blobs: dict[str, bytes] = {}
    manifests = []
    for reference, image in sorted(images.items()):
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _blob(blobs, _CONFIG, image.config()),
            "layers": [_blob(blobs, _LAYER, layer) for layer in image.layers],
        }
        names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference}
        descriptor = _blob(blobs, _MANIFEST, _json(manifest))
        manifests.append(descriptor | {"annotations": names})
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests}),
        **{f"blobs/sha256/{digest}": content for digest, content in sorted(blobs.items())},
    }
    return _tar(files)


def _blob(blobs: dict[str, bytes], media_type: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as target:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            target.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
