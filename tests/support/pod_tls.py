"""Files of a pod with ``scheduling.tls``, as kubelet mounts and replaces them."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_operator.api.names import owner_of
from grpo_operator.api.v1alpha1.tls import TlsSpec
from grpo_operator.render.tls import tls_config, tls_secret
from grpo_worker.common import tls

VARIABLES = (tls.FOLDER, tls.NAME, tls.PAIR_NAME)


def owner(kind: str, name: str, uid: str) -> dict[str, Any]:
    """Return a GRPOJob or RolloutPool."""
    meta = {"name": name, "uid": uid, "namespace": "ns"}
    return {"apiVersion": "rl.grpo.dev/v1alpha1", "kind": kind, "metadata": meta}


class PodTls:
    """The certificates of one pod. ``of``: GRPOJob or RolloutPool. ``pool``: the shared one of a job."""

    def __init__(self, folder: Path, master: str, of: dict[str, Any], pool: str | None = None) -> None:
        self.folder = folder
        self._master, self._of, self._pool = master, of, pool
        self.see(time.time())

    def see(self, now: float) -> None:
        """Replace all files by those of a time."""
        spec = TlsSpec()
        content = tls_config(self._master, self._of, spec, now)["data"]
        self.replace(content | tls_secret(self._master, self._of, spec, self._pool))

    def replace_authority(self, other: str) -> Iterator[None]:
        """Replace CA, certificate and private key by those of another master key, as users do with their own.

        Yields after each step: both CAs are trusted, the new certificate is there, the old CA is not trusted.
        """
        new = PodTls(self.folder.with_name(f"{self.folder.name}-new"), other, self._of, self._pool).content()
        old, certificate, ca = self.content(), ("tls.crt", "tls.key"), "ca.crt"
        both = {ca: old[ca] + new[ca]}
        for changes in (both, both | {name: new[name] for name in certificate}, {ca: new[ca]}):
            self.replace(self.content() | changes)
            yield

    def content(self) -> dict[str, str]:
        """Return the files' content."""
        names = ("tls.crt", "tls.key", "ca.crt", "generate")
        return {name: (self.folder / name).read_text() for name in names}

    def replace(self, content: dict[str, str]) -> None:
        """Replace all files at once, as kubelet does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data, before = self.folder / "..data", (self.folder / "..data").resolve()
        new = self.folder / f"..{time.time_ns()}"
        new.mkdir()
        for name, text in content.items():
            (new / name).write_text(text)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        link = self.folder / "..data_tmp"
        link.symlink_to(new.name)
        link.replace(data)
        if before != data:
            shutil.rmtree(before)

    @property
    def env(self) -> dict[str, str]:
        """Variables of the pod's containers."""
        own = owner_of(self._of)
        pool = {tls.PAIR_NAME: f"{self._pool}.{own.namespace}.grpo"} if self._pool else {}
        return {tls.FOLDER: str(self.folder), tls.NAME: own.tls_name} | pool

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let this process be one of the pod."""
        outside = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        with mock.patch.dict(os.environ, outside | self.env, clear=True):
            yield
