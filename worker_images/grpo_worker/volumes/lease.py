"""The lease of a fetch: of all jobs that want the same files, one fetches them."""

import json
import logging
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0  # a holder that is silent for so long is dead


@dataclass(frozen=True, slots=True)
class Holder:
    """``writer``: the job. ``pod``: which of its pods. ``progress``: how far it is."""

    writer: str
    pod: str
    progress: str = ""


class FetchLease:
    """A file in the volume's directory. Its modification time is the holder's heartbeat.

    Two pods may both hold it for a moment, when both take over from a dead one. This costs traffic and no
    more: each writes partial files of its own.
    """

    def __init__(self, directory: Path, writer: str, pod: str) -> None:
        self._path, self._temporary = directory / "LEASE", directory / f"LEASE.{writer}.{pod}"
        self._writer, self._pod = writer, pod
        self._heart: tuple[threading.Thread, threading.Event] | None = None  # and what stops it
        self.progress = ""
        self.lost = threading.Event()

    def acquire(self) -> bool:
        """Take the lease if nobody has it. Is it this pod's now? Raises OSError."""
        if self._heart and not self.lost.is_set():
            return True
        self.release()
        if not self._take():
            return False
        self.lost.clear()
        ended = threading.Event()
        thread = threading.Thread(target=self._keep, args=(ended,), daemon=True, name="lease")
        self._heart = thread, ended
        thread.start()
        return True

    def release(self) -> None:
        """Give up the lease if it is this pod's."""
        if self._heart is None:
            return
        thread, ended = self._heart
        self._heart = None
        ended.set()
        thread.join()  # or its last heartbeat would bring the file back
        try:
            if self._is_own(self.holder()):
                self._path.unlink()
        except OSError as error:
            log.warning("the lease is not removed and expires in %.0f s: %s", STALE_SECONDS, error)

    def holder(self) -> Holder | None:
        """Who fetches; None: nobody. Raises OSError."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        try:
            return Holder(**json.loads(text))
        except (ValueError, TypeError):  # its holder is writing it, or died in doing so
            return Holder("", "")

    def _take(self) -> bool:
        holder = self.holder()
        if holder is None:
            with suppress(FileExistsError), self._path.open("x") as file:
                file.write(self._text())
        elif self._is_own(holder) or self._age() > STALE_SECONDS:
            self._beat()
        return self._is_own(self.holder())

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            try:
                if not self._is_own(self.holder()):
                    self.lost.set()
                    return
                self._beat()
            except OSError as error:
                log.warning("heartbeat of the fetch: %s", error)

    def _beat(self) -> None:
        self._temporary.write_text(self._text())
        self._temporary.replace(self._path)

    def _age(self) -> float:
        """Seconds since the last heartbeat, by the clock of the filesystem: those of nodes differ."""
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
