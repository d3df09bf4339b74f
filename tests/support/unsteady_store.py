"""A store on real files that hangs, or answers every call with an error, for as long as a test wants."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from grpo_devcluster import packages
from support.faults import until

WELL, HANG = "well", "hang"
# Not imported: that needs libfuse, which ``mounted`` installs.
_PROGRAM = Path(__file__).with_name("unsteady_mount.py")


class UnsteadyStore:
    """A mounted store. ``path``: where pods find it."""

    def __init__(self, path: Path, control: Path) -> None:
        self.path = path
        self._control = control

    @contextlib.contextmanager
    def is_(self, mode: str) -> Iterator[None]:
        """Let all calls hang (HANG) or fail with an error of ``errno``, and check that some did."""
        before = self._met()
        self._control.write_text(mode)
        try:
            yield
            assert self._met() > before, f"no call has met {mode}"
        finally:
            self._control.write_text(WELL)

    def _met(self) -> int:
        return self._control.with_suffix(".met").stat().st_size


@contextlib.contextmanager
def mounted(folder: Path, mount: Path, control: Path) -> Iterator[UnsteadyStore]:
    """Mount ``folder`` at ``mount``, and unmount it at the end. ``control``: file of the mode."""
    packages.install_debian(("libfuse3-3", "fuse3"))
    for path in (folder, mount):
        path.mkdir(parents=True, exist_ok=True)
    control.write_text(WELL)
    command = [sys.executable, str(_PROGRAM), str(folder), str(mount), str(control)]
    process = subprocess.Popen(command)
    try:
        until("the store is mounted", mount.is_mount, 20)
        yield UnsteadyStore(mount, control)
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=False)
        process.terminate()
        process.wait(20)
