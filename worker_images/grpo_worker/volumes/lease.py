"""Lease of a fetch: of all jobs that need the same files, one fetches them."""

import json
import logging
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_worker.common.known_fields import known

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0  # a holder without a heartbeat for this long is considered dead


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lease. ``writer``: the job. ``pod``: the job's pod. ``progress``: its last message."""

    writer: str
    pod: str
    progress: str = ""


class FetchLease:
    """A file in the volume's directory, whose modification time is the holder's heartbeat.

    Two pods may both hold the lease for a moment when both take over from a dead holder. This only costs
    traffic, because each writes its own partial files.
    """

    def __init__(self, directory: Path, writer: str, pod: str) -> None:
        self._path, self._temporary = directory / "LEASE", directory / f"LEASE.{writer}.{pod}"
        self._writer, self._pod = writer, pod
        self._heartbeat: tuple[threading.Thread, threading.Event] | None = None  # and its stop event
        self.progress = ""
        self.lost = threading.Event()

    def acquire(self) -> bool:
        """Acquire the lease if it is free; return whether this pod holds it. Raises OSError."""
        if self._heartbeat and not self.lost.is_set():
            return True
        self.release()
        if not self._try_acquire():
            return False
        self.lost.clear()
        stop = threading.Event()
        thread = threading.Thread(target=self._renew_until, args=(stop,), daemon=True, name="lease")
        self._heartbeat = thread, stop
        thread.start()
        return True

    def release(self) -> None:
        """Release the lease if this pod holds it."""
        if self._heartbeat is None:
            return
        thread, stop = self._heartbeat
        self._heartbeat = None
        stop.set()
        thread.join()  # otherwise its last heartbeat could recreate the file
        try:
            if self._is_own(self.holder()):
                self._path.unlink()
        except OSError as error:
            log.warning("cannot remove the lease, which expires in %.0f s: %s", STALE_SECONDS, error)

    def holder(self) -> Holder | None:
        """Return the holder of the lease, or None. Raises OSError."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        try:
            return Holder(**known(Holder, json.loads(text)))
        except (ValueError, TypeError):  # the holder is writing the file, or died while it did
            return Holder("", "")

    def _try_acquire(self) -> bool:
        holder = self.holder()
        if holder is None:
            with suppress(FileExistsError), self._path.open("x") as file:
                file.write(self._text())
        elif self._is_own(holder) or self._age() > STALE_SECONDS:
            self._renew()
        return self._is_own(self.holder())

    def _renew_until(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_SECONDS):
            try:
                if not self._is_own(self.holder()):
                    self.lost.set()
                    return
                self._renew()
            except OSError as error:
                log.warning("cannot renew the lease: %s", error)

    def _renew(self) -> None:
        self._temporary.write_text(self._text())
        self._temporary.replace(self._path)

    def _age(self) -> float:
        """Return the seconds since the last heartbeat by the filesystem's clock; nodes' clocks differ."""
        try:
            self._temporary.write_text("now")
            return self._temporary.stat().st_mtime - self._path.stat().st_mtime
        except FileNotFoundError:  # just released
            return 0.0
        finally:
            self._temporary.unlink(missing_ok=True)

    def _is_own(self, holder: Holder | None) -> bool:
        return holder is not None and (holder.writer, holder.pod) == (self._writer, self._pod)

    def _text(self) -> str:
        return json.dumps(asdict(Holder(self._writer, self._pod, self.progress)))
