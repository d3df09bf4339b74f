"""Entry point of the pod that exports a checkpoint of a job as a Hugging Face directory.

Usage: ``python3 -m grpo_worker.megatron.export.offline ORDER``. ``ORDER``: see ``ExportOrder``. One
process on CPUs holds one tensor, or one expert, and one file at a time. The job may run meanwhile. The
process may be killed at any moment and run again.
"""

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_operator.api.catalog.presets import PRESET
from grpo_worker.checkpointing.exports import CONFIG, EXPORTS
from grpo_worker.checkpointing.restart_point import CHECKPOINTS
from grpo_worker.checkpointing.store import MARKER, DamagedCheckpointError, complete, model_digest, verify
from grpo_worker.common.errors import one_line
from grpo_worker.common.log_lines import log_as
from grpo_worker.common.repeated import repeated
from grpo_worker.common.store_path import JobFolder, StorePath, has_file
from grpo_worker.common.store_problems import UnwritableStoreError
from grpo_worker.megatron.conversion.checkpoint_map import EMBEDDING, StoredTensor, stored_tensors
from grpo_worker.megatron.export.companions import write_companions
from grpo_worker.megatron.export.config import exported_config
from grpo_worker.megatron.export.files import FileWriter, index_of, stored
from grpo_worker.megatron.export.order import ExportOrder
from grpo_worker.megatron.export.owner import ProgramOwner
from grpo_worker.megatron.export.place import ExportPlace, place_of
from grpo_worker.megatron.export.stored_checkpoint import StoredCheckpoint
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.model_files.config import model_config
from grpo_worker.model_files.names import INDEX

log = logging.getLogger(__name__)
_REPORT_SECONDS = 10.0


def main(arguments: list[str]) -> None:
    """Write the export, or exit with a message about what is in the way."""
    log_as("export")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the export was interrupted"))
    try:
        request = ExportOrder.parse(arguments[0])
    except ValueError as error:
        sys.exit(f"the argument of the export is not valid: {error}")
    try:
        export(request)
    except (OSError, ValueError, ImportError, UnwritableStoreError) as error:
        foreign = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno)
        text = one_line(error) if foreign else " ".join(str(error).split())
        sys.exit(f"{request.store.label}: step {request.step} is not exported as {request.name}: {text}")


def export(request: ExportOrder) -> None:
    """Write an export of a complete checkpoint into the job's folder.

    Raises ValueError if the checkpoint is not there, damaged or of another model, FileExistsError if there is
    an export of that name, and OSError or UnwritableStoreError if the store cannot be read or written.
    """
    hf = model_config(request.model.path)
    folder = JobFolder.of(request.store, Path(request.folder)).store
    path = _checkpoint(folder / CHECKPOINTS, request.step)
    verify(path, model_digest(hf), contents=True)
    checkpoint = StoredCheckpoint(path)
    tensors = list(stored_tensors(hf, family_of(hf), checkpoint.keys))
    source = None if request.model.path.startswith(PRESET) else Path(request.model.path)
    target = folder / EXPORTS / request.name
    place = place_of(target, ProgramOwner())
    log.info("%s is exported as %s", path, target)
    with _discarded_unless_complete(place, lambda to: write_companions(to, hf, source)), _removal_named(path):
        written = _write(place, checkpoint, tensors, request)
        dtype = str(checkpoint.dtype(EMBEDDING)).removeprefix("torch.")
        config = exported_config(hf, written, dtype, request.quantization)
        place.complete({INDEX: index_of(written), CONFIG: _json(config)})
    log.info("%s is complete", target)


def _checkpoint(root: StorePath, step: int) -> StorePath:
    found = complete(root)
    if step not in found:
        there = f"there are those of steps {', '.join(map(str, found))}" if found else "there is none"
        raise ValueError(f"{root} has no complete checkpoint of step {step}: {there}")
    return found[step]


def _write(
    place: ExportPlace, checkpoint: StoredCheckpoint, tensors: Sequence[StoredTensor], request: ExportOrder
) -> dict[str, tuple[str, int]]:
    """Write the files with weights; return tensor -> (file, bytes). Raises UnwritableStoreError."""
    progress = _Progress(request.name, sum(map(checkpoint.size, tensors)))
    with (
        ThreadPoolExecutor(1, thread_name_prefix="export") as thread,
        repeated(progress.report, _REPORT_SECONDS, "progress"),
    ):
        writer = FileWriter(place, 0, thread, beside=False)
        for tensor, values in checkpoint.read(tensors):
            for part in tensor.parts:
                rows = torch.cat([values[first:end] for first, end in part.rows])
                writer.add(stored(part.name, rows, request.quantization))
            if writer.failed:
                break
            progress.done += values.nbytes
        writer.flush()
    if writer.report.failure is not None:
        raise UnwritableStoreError(writer.report.failure, writer.report.errno)
    return writer.report.tensors


class _Progress:
    """Share of the weights that were read and handed to the writer. ``total``, ``done``: bytes."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self.done = name, total, 0

    def report(self) -> None:
        share = 100 * self.done / self._total
        log.info("%s: %.1f %% of %.2f GiB of weights are exported", self._name, share, self._total / 2**30)


@contextmanager
def _discarded_unless_complete(place: ExportPlace, write_small: Callable[[Path], None]) -> Iterator[None]:
    """Begin an export, and remove what was written of it if the context ends with an error."""
    try:
        place.begin(write_small)
        yield
    except BaseException:
        place.discard()
        raise


@contextmanager
def _removal_named(path: StorePath) -> Iterator[None]:
    """Say so if a file is missing because the job has removed the checkpoint meanwhile."""
    try:
        yield
    except (FileNotFoundError, DamagedCheckpointError) as error:
        if has_file(path / MARKER):
            raise
        raise ValueError(
            f"the job has removed {path} meanwhile: export a newer checkpoint, or raise checkpoint.keep"
        ) from error


def _json(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=1, sort_keys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
