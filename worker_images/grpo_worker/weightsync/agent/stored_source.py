"""Source of a version in the checkpoint store: opens it, so that its chunks can be streamed."""

from pathlib import Path

from grpo_worker.weightsync.agent.blobs import DamageError
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.file_reader import FileReader
from grpo_worker.weightsync.agent.sources import each
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.protocol.stored_version import (
    StoredVersionError,
    manifests_in,
    read_manifest,
    stored_blob,
)
from grpo_worker.weightsync.protocol.tiling import make_plan
from grpo_worker.weightsync.protocol.transfer_plan import make_transfer_plan


def open_stored(
    folder: Path, version: int, reader: FileReader, fetcher: Fetcher, bucket_bytes: int
) -> StagedVersion:
    """Return the version in ``folder``. Raises FetchError, DamageError for other files, or PlanError.

    ``bucket_bytes``: upper limit of a bucket.
    """
    files = reader.run(str(folder), lambda: manifests_in(folder))

    def manifest(file: Path) -> Manifest:
        return reader.run(str(file), lambda: _undamaged(file))

    manifests = each(manifest, files)
    tiles = make_plan(manifests)
    if tiles.version != version:
        raise DamageError(f"{folder}: version {tiles.version} is there, not {version}")
    plan = make_transfer_plan(tiles, bucket_bytes)
    paths = {m.rank: str(stored_blob(folder, m.rank)) for m in manifests}
    blobs = fetcher.stored_blobs(reader, paths, manifests)
    digests = [m.digest for m in sorted(manifests, key=lambda m: m.rank)]
    return StagedVersion(version, plan, digests, blobs, stored=str(folder))


def _undamaged(file: Path) -> Manifest:
    try:
        return read_manifest(file)
    except StoredVersionError as error:
        raise DamageError(str(error)) from error
