"""Claims of a job's attempts: which one is the newest, and from which step it started.

A claim is a folder ``attempts/00000003`` in the job's folder. Exactly one controller can claim a number: it
renames a folder with its own id to that name, which a file system, NFS too, refuses once a claim is there.
Opening a folder makes an NFS client ask the server, so other nodes see a claim at once. In an object store
it creates the object with its id on the condition that there is none. In both, the id in the claim also tells
of a claim whose answer was lost.
"""

import errno
import re
from pathlib import Path

from grpo_worker.checkpointing.rollbacks import abandoned
from grpo_worker.common.files import write_text
from grpo_worker.common.store_path import StorePath, children, create, remove_tree

ATTEMPTS = "attempts"  # in the folder of a job
_OWNER, _RESTORED = "owner", "restored"
_NUMBER = re.compile(r"\d{8,}")  # name of a claim
_DRAFT = re.compile(r"\.(\d{8,})\..+")  # of a claim that is being made
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)  # what file systems answer when a claim is there


class SupersededError(RuntimeError):
    """Another controller of this job has begun an attempt, so this one must change nothing any more."""


def newest(folder: StorePath) -> int:
    """Return the newest attempt that was claimed; 0: none was."""
    return max(_claims(folder), default=0)


def refuse(newer: int, attempt: int) -> None:
    """Raise SupersededError if ``newer``, an attempt of the job, is newer than ``attempt``."""
    if newer > attempt:
        raise SupersededError(
            f"attempt {newer} has begun in another controller; this one is attempt {attempt}"
        )


def check(folder: StorePath, attempt: int) -> None:
    """Raise SupersededError if a newer attempt was claimed."""
    refuse(newest(folder), attempt)


def claim(folder: StorePath, attempt: int, owner: str) -> bool:
    """Claim an attempt for the controller ``owner``; return False if another one has it or a newer one.

    Older claims that nobody needs are removed. Raises OSError when the store does not answer; the claim may
    have been made then, see ``owned``.
    """
    place = _place(folder, attempt)
    if isinstance(place, Path):
        _rename_draft(place, owner)
    else:
        create(place / _OWNER, owner)
    # A number below the newest one may have been forgotten, and could be claimed a second time.
    if not owned(folder, attempt, owner) or newest(folder) != attempt:
        return False
    _forget_older(folder, attempt)
    return True


def owned(folder: StorePath, attempt: int, owner: str) -> bool:
    """Return whether the controller ``owner`` has claimed an attempt, also if it got no answer."""
    try:
        return (_place(folder, attempt) / _OWNER).read_text() == owner
    except FileNotFoundError:
        return False


def note_restored(folder: StorePath, attempt: int, step: int) -> None:
    """Note the step from which an attempt starts: what older attempts complete beyond it does not count."""
    write_text(_place(folder, attempt) / _RESTORED, str(step))


def restored(folder: StorePath) -> tuple[int, int]:
    """Return the newest attempt that has restored a state, and the step of that; (0, 0): there is none."""
    for attempt in sorted(_claims(folder), reverse=True):
        step = _step(_place(folder, attempt))
        if step is not None:
            return attempt, step
    return 0, 0


def counts(folder: StorePath, step: int, attempt: int) -> bool:
    """Return whether what an attempt saved after ``step`` belongs to the job's course.

    It does not if a newer attempt has started from an earlier step: that one repeats the step. Nor does it
    if the job was rolled back to an earlier step since.
    """
    newer, start = restored(folder)
    return (attempt >= newer or step <= start) and not abandoned(folder, step, attempt)


def _place(folder: StorePath, attempt: int) -> StorePath:
    return folder / ATTEMPTS / f"{attempt:08d}"


def _rename_draft(place: Path, owner: str) -> None:
    draft = place.with_name(f".{place.name}.{owner}")
    try:
        draft.mkdir(parents=True, exist_ok=True)
        (draft / _OWNER).write_text(owner)
        draft.rename(place)
    except FileNotFoundError:
        return  # who has this attempt or a newer one has removed the draft
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        remove_tree(draft)


def _claims(folder: StorePath) -> list[int]:
    return [int(name) for name in children(folder / ATTEMPTS) if _NUMBER.fullmatch(name)]


def _step(place: StorePath) -> int | None:
    try:
        return int((place / _RESTORED).read_text())
    except FileNotFoundError:
        return None


def _forget_older(folder: StorePath, attempt: int) -> None:
    """Remove older claims but the newest one that has restored a state, and drafts that came too late."""
    kept = restored(folder)[0]
    for number in _claims(folder):
        if number < attempt and number != kept:
            remove_tree(_place(folder, number))
    for name in children(folder / ATTEMPTS):
        found = _DRAFT.fullmatch(name)
        if found and int(found[1]) <= attempt:
            remove_tree(folder / ATTEMPTS / name)
