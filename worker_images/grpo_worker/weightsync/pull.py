"""Rollout-side receive: pull the trainer ranks' slices and assemble whole tensors in memory."""

import math

import httpx
import torch

from grpo_worker.weightsync.dtypes import dtype_of
from grpo_worker.weightsync.manifest import Manifest, digest
from grpo_worker.weightsync.plan import Plan, TensorPlan


class PullError(RuntimeError):
    """A source did not deliver; the message names it."""


class Puller:
    """Reads one version from the trainer-side agents at ``sources`` (rank -> base URL)."""

    def __init__(self, sources: dict[int, str], version: int, timeout: float) -> None:
        self._sources = sources
        self._version = version
        self._client = httpx.Client(timeout=timeout)

    def manifests(self) -> list[Manifest]:
        """All ranks' manifests. Raises PullError when one cannot be had."""
        return [self._manifest(rank) for rank in sorted(self._sources)]

    def tensors(self, plan: Plan, manifests: list[Manifest]) -> dict[str, torch.Tensor]:
        """All whole tensors; every blob's digest is checked before a byte is used."""
        blobs = {m.rank: self._blob(m) for m in manifests}
        return {t.name: _assemble(t, blobs) for t in plan.tensors}

    def _url(self, rank: int, suffix: str) -> str:
        return f"{self._sources[rank]}/v1/weights/{self._version}/{rank}.{suffix}"

    def _manifest(self, rank: int) -> Manifest:
        return Manifest.from_json(_get(self._client, self._url(rank, "json")))

    def _blob(self, manifest: Manifest) -> bytes:
        url = self._url(manifest.rank, "bin")
        data = _get(self._client, url)
        if len(data) != manifest.blob_bytes or digest(data) != manifest.digest:
            raise PullError(f"{url}: {len(data)} bytes with another digest than the manifest's")
        return data


def _get(client: httpx.Client, url: str) -> bytes:
    try:
        response = client.get(url)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise PullError(f"{url}: {error!r}") from error
    return response.content


def _assemble(tensor: TensorPlan, blobs: dict[int, bytes]) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
    for rank, part in tensor.pieces:
        shape = list(tensor.shape)
        shape[part.dim] = part.length
        view = torch.frombuffer(
            bytearray(blobs[rank][part.start : part.start + part.nbytes]), dtype=whole.dtype
        )
        assert view.numel() == math.prod(shape)
        whole.narrow(part.dim, part.offset, part.length).copy_(view.view(shape))
    return whole
