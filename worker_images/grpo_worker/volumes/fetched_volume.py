"""A directory of the job's store with the files of a URI, fetched once for all jobs of the store."""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from grpo_operator.api.v1alpha1.volumes import COMPLETE, FETCHED_FILES, VolumeSpec
from grpo_worker.volumes.lease import FetchLease
from grpo_worker.volumes.progress import FetchProgress, amount
from grpo_worker.volumes.remote.errors import PermanentFetchError, TransientFetchError
from grpo_worker.volumes.remote.remote_file import (
    RemoteFile,
    Source,
    check_content,
    check_names,
    named_errors,
)
from grpo_worker.volumes.remote.source import open_source
from grpo_worker.volumes.store_errors import StoreUnavailableError, store_errors

_AT_ONCE = 8  # files
_POLL_SECONDS = 2.0  # between polls while another job fetches
_FRUITLESS = 3  # attempts without a byte until the message says what to check
Credential = Callable[[], str | None]


class FetchedVolume:
    """A volume with a ``uri``. Of all jobs with the same URI, the holder of a lease fetches it.

    ``field``: spec.model.volume or spec.data.volume. ``credential``: called when this pod fetches.
    ``writer``: the job, which continues its partial files when its pod is replaced.
    """

    def __init__(
        self, field: str, spec: VolumeSpec, directory: Path, credential: Credential, writer: str, pod: str
    ) -> None:
        self._field, self._spec, self._credential = field, spec, credential
        self._directory, self._files = directory, directory / FETCHED_FILES
        self._partial, self._revision = directory / "partial" / writer, directory / "REVISION"
        self._lease = FetchLease(directory, writer, pod)
        self._writer = writer

    def fetch(self, report: Callable[[str], None], first_pause: float = 1.0) -> None:
        """Fetch the missing files, or wait for the job that fetches them; retry transient errors forever.

        ``report`` receives progress messages. ``first_pause``: seconds before a retry, doubled up to 60 while
        no byte arrives.

        Raises PermanentFetchError that names field, value and remedy.
        """

        def publish(message: str) -> None:
            self._lease.progress = message
            report(message)

        pause, fruitless = first_pause, 0
        try:
            while True:
                progress = FetchProgress(f"fetching {self._field}", publish)
                try:
                    if self._advance(progress, publish):
                        return
                    time.sleep(_POLL_SECONDS)
                except TransientFetchError as error:
                    pause, fruitless = (first_pause, 0) if progress.received else (pause, fruitless + 1)
                    if fruitless:
                        self._lease.release()  # another job may reach the source
                    hint = self._hint(error) if fruitless >= _FRUITLESS else ""
                    publish(f"{progress}; interrupted: {error}{hint}; next try in {pause:.0f} s")
                    time.sleep(pause)
                    pause = min(2 * pause, 60.0)
        finally:
            self._lease.release()

    def _hint(self, error: TransientFetchError) -> str:
        if isinstance(error, StoreUnavailableError):
            return ""
        given = "endpoint" if self._spec.endpoint else "uri"
        return f"; check {self._field}.{given} and the proxy, DNS and certificates of the controller's pod"

    def _advance(self, progress: FetchProgress, report: Callable[[str], None]) -> bool:
        """Fetch, unless another job does; return whether all files are complete."""
        with self._explained():
            if self._is_complete():
                return True
            self._directory.mkdir(parents=True, exist_ok=True)
            acquired, holder = self._lease.acquire(), self._lease.holder()
            if acquired and self._is_complete():
                return True  # the previous holder finished between the check and the lease
        if acquired:
            self._attempt(progress, report)
        elif holder:
            who = "another pod of this job" if holder.writer == self._writer else "another job"
            report(f"{self._field}: {who} fetches it: {holder.writer}: {holder.progress}".rstrip(": "))
        return acquired

    def _is_complete(self) -> bool:
        return (self._directory / COMPLETE).exists()

    def _attempt(self, progress: FetchProgress, report: Callable[[str], None]) -> None:
        token = self._credential()
        with self._explained():
            self._partial.mkdir(parents=True, exist_ok=True)
            self._files.mkdir(exist_ok=True)
            source = open_source(self._spec, token, self._begun_revision())
            files = self._listing(source)
            self._remove_others(files)
            self._check_space(files)
            self._download_all(source, files, progress)
        if self._spec.digest:
            self._check_digest(files, report)
        with self._explained():
            self._finish(files)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors to those of a fetch that name the field."""
        try:
            with store_errors():
                yield
        except PermanentFetchError as error:
            raise PermanentFetchError(f"{self._field}.uri={self._spec.uri}: {error}") from error

    def _begun_revision(self) -> str | None:
        try:
            return self._revision.read_text()
        except FileNotFoundError:
            return None

    def _listing(self, source: Source) -> list[RemoteFile]:
        try:
            files = source.files()
        except PermanentFetchError:
            self._revision.unlink(missing_ok=True)  # the repository may have been recreated
            raise
        check_names(files)
        if source.revision:
            self._write(self._revision, source.revision)
        return files

    def _check_space(self, files: list[RemoteFile]) -> None:
        missing = [file for file in files if not self._is_there(file)]
        needed = sum((file.size or 0) - self._fetched(file) for file in missing)
        free = self._free()
        if needed > free:
            self._remove_partial_of_others()
            free = self._free()
        if needed > free:
            raise PermanentFetchError(
                f"{amount(needed)} are to be fetched and the job's store has {amount(free)} free: free space "
                "in it, or set another checkpoint.store"
            )

    def _free(self) -> int:
        return shutil.disk_usage(self._directory).free

    def _remove_partial_of_others(self) -> None:
        """Remove the partial files of other jobs, which do not hold the lease."""
        for path in self._partial.parent.iterdir():
            if path != self._partial:
                shutil.rmtree(path, ignore_errors=True)

    def _download_all(self, source: Source, files: list[RemoteFile], progress: FetchProgress) -> None:
        """Download all files; a transient error affects one file only, a permanent error stops all."""
        stop = threading.Event()
        progress.expect({file.path: file.size for file in files})
        interrupted: TransientFetchError | None = None
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            futures = [pool.submit(self._download, source, file, progress, stop) for file in files]
            for future in as_completed(futures):
                try:
                    future.result()
                except TransientFetchError as error:
                    interrupted = error
                except BaseException:
                    stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        if interrupted:
            raise interrupted
        if self._lease.lost.is_set():
            raise TransientFetchError("another job has taken over")

    def _download(
        self, source: Source, file: RemoteFile, progress: FetchProgress, stop: threading.Event
    ) -> None:
        with store_errors():
            if self._is_there(file):
                progress.begin(file.path, self._target(file).stat().st_size)
                return
            partial, offset = self._partial_of(file), self._fetched(file)
            progress.begin(file.path, offset)
            with partial.open("ab" if offset else "wb") as handle:
                if offset != file.size or offset == 0:
                    for chunk in named_errors(file, source.read(file, offset)):
                        handle.write(chunk)
                        progress.receive(file.path, len(chunk))
                        if stop.is_set() or self._lease.lost.is_set():
                            return
                handle.flush()
                os.fsync(handle.fileno())
            check_content(partial, file)
            target = self._target(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.replace(target)

    def _is_there(self, file: RemoteFile) -> bool:
        target = self._target(file)
        return target.is_file() and file.size in (None, target.stat().st_size)

    def _target(self, file: RemoteFile) -> Path:
        return self._files / file.path

    def _partial_of(self, file: RemoteFile) -> Path:
        name = hashlib.sha256(f"{file.path}\n{file.version}".encode()).hexdigest()
        return self._partial / name[:16]

    def _fetched(self, file: RemoteFile) -> int:
        """Return the bytes of a file fetched by an earlier attempt, 0 unless its version is the same."""
        partial = self._partial_of(file)
        if not file.version or file.size is None or not partial.exists():
            return 0
        size = partial.stat().st_size
        return size if size <= file.size else 0

    def _remove_others(self, files: list[RemoteFile]) -> None:
        """Remove files of an earlier attempt that the source no longer has."""
        expected = {self._target(file) for file in files}
        for path in [path for path in self._files.rglob("*") if path.is_file() and path not in expected]:
            path.unlink(missing_ok=True)

    def _check_digest(self, files: list[RemoteFile], report: Callable[[str], None]) -> None:
        with self._explained():
            digest = self._digest(files, report)
        if digest != self._spec.digest:
            shutil.rmtree(self._files, ignore_errors=True)  # so that the next attempt fetches all files
            raise PermanentFetchError(
                f"{self._field}.digest={self._spec.digest}: the files of {self._spec.uri} have {digest}: "
                "correct digest, or name the revision that has it in uri"
            )

    def _digest(self, files: list[RemoteFile], report: Callable[[str], None]) -> str:
        checking = FetchProgress(f"checking {self._field}", report)
        checking.expect({file.path: self._target(file).stat().st_size for file in files})
        total = hashlib.sha256()
        for file in sorted(files, key=lambda file: file.path):
            own = hashlib.sha256()
            with self._target(file).open("rb") as handle:
                while chunk := handle.read(1 << 20):
                    own.update(chunk)
                    checking.receive(file.path, len(chunk))
            total.update(f"{own.hexdigest()}  {file.path}\n".encode())
        return f"sha256:{total.hexdigest()}"

    def _finish(self, files: list[RemoteFile]) -> None:
        size = sum(self._target(file).stat().st_size for file in files)
        summary = {"uri": self._spec.uri, "files": len(files), "bytes": size}
        self._write(self._directory / COMPLETE, json.dumps(summary))
        shutil.rmtree(self._partial.parent, ignore_errors=True)

    def _write(self, path: Path, text: str) -> None:
        temporary = self._directory / f"{path.name}.{self._writer}"
        temporary.write_text(text)
        temporary.replace(path)
