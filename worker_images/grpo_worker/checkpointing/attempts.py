"""Claims of a job's attempts: which one is the newest, and from which step it started.

A claim is a folder ``attempts/00000003`` in the job's folder. Exactly one controller can claim a number: it
renames a folder with its own id to that name, which a file system, NFS too, refuses once a claim is there.
Unlike the answer to an exclusive create, the id in the claim also tells of a claim whose answer was lost.
Opening a folder makes an NFS client ask the server, so other nodes see a claim at once.
"""

import errno
import re
import shutil
from pathlib import Path

from grpo_worker.common.files import write_text

ATTEMPTS = "attempts"  # in the folder of a job
_OWNER, _RESTORED = "owner", "restored"
_NUMBER = re.compile(r"\d{8,}")  # name of a claim
_DRAFT = re.compile(r"\.(\d{8,})\..+")  # of a claim that is being made
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)  # what file systems answer when a claim is there


class SupersededError(RuntimeError):
    """Another controller of this job has begun an attempt, so this one must change nothing any more."""


def newest(folder: Path) -> int:
    """Return the newest attempt that was claimed; 0: none was."""
    return max(_claims(folder), default=0)


def refuse(newer: int, attempt: int) -> None:
    """Raise SupersededError if ``newer``, an attempt of the job, is newer than ``attempt``."""
    if newer > attempt:
        raise SupersededError(
            f"attempt {newer} has begun in another controller; this one is attempt {attempt}"
        )


def check(folder: Path, attempt: int) -> None:
    """Raise SupersededError if a newer attempt was claimed."""
    refuse(newest(folder), attempt)


def claim(folder: Path, attempt: int, owner: str) -> bool:
    """Claim an attempt for the controller ``owner``; return False if another one has it or a newer one.

    Older claims that nobody needs are removed. Raises OSError when the store does not answer; the claim may
    have been made then, see ``owned``.
    """
    place = _place(folder, attempt)
    draft = place.with_name(f".{place.name}.{owner}")
    try:
        draft.mkdir(parents=True, exist_ok=True)
        (draft / _OWNER).write_text(owner)
        draft.rename(place)
    except FileNotFoundError:
        return False  # who has this attempt or a newer one has removed the draft
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        shutil.rmtree(draft, ignore_errors=True)
    # A number below the newest one may have been forgotten, and could be claimed a second time.
    if not owned(folder, attempt, owner) or newest(folder) != attempt:
        return False
    _forget_older(folder, attempt)
    return True


def owned(folder: Path, attempt: int, owner: str) -> bool:
    """Return whether the controller ``owner`` has claimed an attempt, also if it got no answer."""
    try:
        return (_place(folder, attempt) / _OWNER).read_text() == owner
    except FileNotFoundError:
        return False


def note_restored(folder: Path, attempt: int, step: int) -> None:
    """Note the step from which an attempt starts: what older attempts complete beyond it does not count."""
    write_text(_place(folder, attempt) / _RESTORED, str(step))


def restored(folder: Path) -> tuple[int, int]:
    """Return the newest attempt that has restored a state, and the step of that; (0, 0): there is none."""
    for attempt in sorted(_claims(folder), reverse=True):
        step = _step(_place(folder, attempt))
        if step is not None:
            return attempt, step
    return 0, 0


def counts(folder: Path, step: int, attempt: int) -> bool:
    """Return whether what an attempt saved after ``step`` belongs to the job's course.

    It does not if a newer attempt has started from an earlier step: that one repeats the step.
    """
    newer, start = restored(folder)
    return attempt >= newer or step <= start


def _place(folder: Path, attempt: int) -> Path:
    return folder / ATTEMPTS / f"{attempt:08d}"


def _claims(folder: Path) -> list[int]:
    try:
        return [int(path.name) for path in (folder / ATTEMPTS).iterdir() if _NUMBER.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def _step(place: Path) -> int | None:
    try:
        return int((place / _RESTORED).read_text())
    except FileNotFoundError:
        return None


def _forget_older(folder: Path, attempt: int) -> None:
    """Remove older claims but the newest one that has restored a state, and drafts that came too late."""
    kept = restored(folder)[0]
    for number in _claims(folder):
        if number < attempt and number != kept:
            shutil.rmtree(_place(folder, number), ignore_errors=True)
    for path in (folder / ATTEMPTS).iterdir():
        found = _DRAFT.fullmatch(path.name)
        if found and int(found[1]) <= attempt:
            shutil.rmtree(path, ignore_errors=True)
