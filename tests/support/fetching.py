"""Helpers that fetch volumes from the stand-in hub."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.volumes import VolumeSpec
from grpo_worker.volumes.fetched_volume import FetchedVolume
from support.stand_in_hub import StandInHub

FIELD = "spec.model.volume"
FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer/vocab.txt": b"a\nb\n",
    "model.safetensors": b"0123456789" * 9000,
}
LARGE = frozenset({"model.safetensors"})


def volume(hub: StandInHub, **more: Any) -> VolumeSpec:
    values = {"mountPath": "/models", "uri": "hf://org/model", "endpoint": hub.url} | more
    return VolumeSpec.model_validate(values)


def fetching(
    spec: VolumeSpec, directory: Path, token: str | None = None, writer: str = "job-0", pod: str = "pod-0"
) -> FetchedVolume:
    return FetchedVolume(FIELD, spec, directory, lambda: token, writer, pod)


def fetch(spec: VolumeSpec, directory: Path, token: str | None = None, pause: float = 0.01) -> list[str]:
    """Fetch a volume and return the progress reports."""
    reports: list[str] = []
    fetching(spec, directory, token).fetch(reports.append, pause)
    return reports


def contents(directory: Path) -> dict[str, bytes]:
    root = directory / "files"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def until(done: Callable[[], Any]) -> None:
    """Wait until true, bounded by the test's own timeout."""
    while not done():
        time.sleep(0.02)
