"""Copy of a rank's published version into the checkpoint of its step, from which engines can be filled."""

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from grpo_worker.profiling.progress import BACKGROUND, WRITTEN
from grpo_worker.weightsync.protocol.manifest import Manifest, rank_file
from grpo_worker.weightsync.protocol.stored_version import stored_blob, stored_manifest

log = logging.getLogger(__name__)
_STEP = 16 << 20  # bytes between two counts of progress
_SYNC = 256 << 20  # bytes after which the store must have taken what was written


class VersionCopy:
    """Copies what ``rank`` has published as ``version`` below ``root`` to the folder ``to``, once.

    The copy is read from the memory in which engines' agents find the version, and no memory is added for it.
    So it ends, incomplete, when the publisher needs that memory for a later version: training does not wait
    for a store. Nor does it fail because of one. A copy is complete when its manifest is there.
    """

    def __init__(self, root: Path, version: int, rank: int, to: Path) -> None:
        self._root, self._rank, self._to = root, rank, to
        self._version = version
        self._overtaken = threading.Event()

    def before_publishing(self, version: int) -> None:
        """Give up an incomplete copy whose bytes the publication of ``version`` overwrites."""
        if version > self._version + 1:
            self._overtaken.set()

    def run(self) -> None:
        """Copy the version."""
        try:
            self._copy()
        except Exception as error:  # noqa: BLE001 - the thread goes on to write the checkpoint itself
            log.warning("the checkpoint of step %d gets no weights for engines: %s", self._version, error)
            with suppress(OSError):
                stored_blob(self._to, self._rank).unlink()

    def _copy(self) -> None:
        text = rank_file(self._root, self._version, self._rank, "json").read_bytes()
        self._to.mkdir(exist_ok=True)
        self._copy_blob(Manifest.from_json(text).blob_bytes)
        # Asked after the last byte was read, and set before the first one is overwritten.
        if self._overtaken.is_set():
            raise OSError(f"version {self._version + 2} was published before the store had taken its bytes")
        file = stored_manifest(self._to, self._rank, text)
        temporary = file.with_suffix(".tmp")
        temporary.write_bytes(text)
        temporary.rename(file)

    def _copy_blob(self, size: int) -> None:
        blob = rank_file(self._root, self._version, self._rank, "bin")
        with blob.open("rb") as source, stored_blob(self._to, self._rank).open("wb") as target:
            start = 0
            while start < size and not self._overtaken.is_set():
                sent = os.sendfile(target.fileno(), source.fileno(), start, min(_STEP, size - start))
                if not sent:
                    raise OSError(f"{blob} ends at byte {start} of {size}")
                if start // _SYNC != (start + sent) // _SYNC:
                    os.fdatasync(target.fileno())
                start += sent
                BACKGROUND.add(WRITTEN, sent)
            os.fsync(target.fileno())
