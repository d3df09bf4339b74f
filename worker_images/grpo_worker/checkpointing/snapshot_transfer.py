"""Copies of snapshots between pods. Nothing is fetched or kept whose seal is not of this job."""

import logging
from collections.abc import Sequence
from pathlib import Path

import httpx

from grpo_worker.checkpointing.snapshot_seal import NOTE_BYTES, Note, Snapshot, SnapshotError, content_digest
from grpo_worker.checkpointing.snapshots import NOTE, STATE, check, file_of
from grpo_worker.common import tls
from grpo_worker.common.auth import headers
from grpo_worker.common.files import write_text

log = logging.getLogger(__name__)
_CHUNK = 16 << 20


def pull(root: Path, which: Snapshot, holders: Sequence[str], timeout: float) -> None:
    """Fetch a rank's snapshot from the first holder that has a sound one, unless this pod has it.

    ``holders``: base URLs of agents. Raises SnapshotError with what is wrong at this pod and at each holder,
    ValueError for an invalid name, and PermissionError when the key cannot be read.
    """
    file = file_of(root, which.name, which.rank)
    try:
        check(root, which)
        return
    except SnapshotError as error:
        problems = [f"here: {error}"]
        if file.is_file():
            log.warning("%s of this pod is not used: %s", which, error)
    for holder in holders:
        try:
            _fetch(f"{holder}/v1/snapshots/{which.name}/{which.rank}", file, which, timeout)
            return
        except (httpx.HTTPError, OSError, SnapshotError) as error:
            problems.append(f"{holder}: {error}")
            log.warning("%s of %s is not used: %s", which, holder, error)
    raise SnapshotError(f"{which} is nowhere to be had. " + "; ".join(problems))


def _fetch(url: str, file: Path, which: Snapshot, timeout: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".pulled")
    with httpx.Client(timeout=timeout, headers=headers(), verify=tls.own()) as client:
        note = _note(client, url + NOTE)
        note.verify(which)
        try:
            _stream(client, url + STATE, temporary, note)
            temporary.rename(file)
        finally:
            temporary.unlink(missing_ok=True)
    write_text(file.with_suffix(NOTE), note.text())


def _note(client: httpx.Client, url: str) -> Note:
    text = b""
    with client.stream("GET", url) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            text += chunk
            if len(text) > NOTE_BYTES:
                raise SnapshotError(f"its note has more than {NOTE_BYTES} bytes")
    return Note.parse(text)


def _stream(client: httpx.Client, url: str, to: Path, note: Note) -> None:
    """Write a file in one pass that also computes its digest, and no byte more than the note says."""
    digest, size = content_digest(), 0
    with client.stream("GET", url) as response, to.open("wb") as handle:
        response.raise_for_status()
        for chunk in response.iter_bytes(_CHUNK):
            size += len(chunk)
            if size > note.size:
                break
            digest.update(chunk)
            handle.write(chunk)
    if size != note.size or digest.hexdigest() != note.digest:
        raise SnapshotError("its bytes are not those of its digest")
