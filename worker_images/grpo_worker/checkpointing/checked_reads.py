"""Reads of a checkpoint's tensors that are checked, from a file system or an object store."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

from grpo_worker.checkpointing.object_files import ObjectFiles
from grpo_worker.checkpointing.piece_digests import PieceDigests
from grpo_worker.checkpointing.store import MARKER, DamagedCheckpointError
from grpo_worker.profiling.progress import PROGRESS, READ

# State of checkpoints in an object store, by the path of their readers.
OBJECT_FILES: dict[str, ObjectFiles] = {}


def check_reads(reader: Any) -> None:
    """Count and check what a reader of checkpoints (torch's FileSystemReader or one derived from it) reads.

    A reader of a folder of ``OBJECT_FILES`` reads the state there. Files of earlier versions have no digests
    beside them, and are checked by the checksums that torch.save has put into them.
    """
    original, original_read = reader._slice_file, reader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        files = OBJECT_FILES.get(str(self.path))
        if files is not None:
            self.fs = files
            by_file: dict[str, list[tuple[str, int, int]]] = {}  # as the original reads them
            for item in plan.items:
                info = self.storage_data[item.storage_index]
                span = (info.relative_path, info.offset, info.length)
                by_file.setdefault(info.relative_path, []).append(span)
            files.expect(span for spans in by_file.values() for span in spans)
        elif not hasattr(self, "piece_digests"):
            marked = (Path(self.path) / MARKER).is_file()
            self.piece_digests = PieceDigests.of(Path(self.path)) if marked else None
        return original_read(self, plan, planner)

    def slice_file(self: Any, file: Any, info: Any) -> io.BytesIO:
        if hasattr(file, "piece"):
            found = io.BytesIO(file.piece(info.offset, info.length))
            PROGRESS.add(READ, info.length)
            return found
        item = original(self, file, info).read()
        PROGRESS.add(READ, info.length)
        name, span = info.relative_path, (info.offset, info.length)
        checked = self.piece_digests is not None and self.piece_digests.check(name, *span, item)
        if not checked and (len(item) != info.length or not is_sound(item)):
            raise DamagedCheckpointError(
                f"checkpoint {self.path}: {name} was changed after the save, between bytes {info.offset} and "
                f"{info.offset + info.length}; use an older checkpoint"
            )
        return io.BytesIO(item)

    reader._slice_file, reader.read_data = slice_file, read_data


def is_sound(item: bytes) -> bool:
    """Return whether a saved object has the checksums that torch.save has put into its archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, OSError):
        return False
