"""Limits that the kernel does not keep for a program: its threads and the space of its files."""

import os
from pathlib import Path

from grpo_worker.rewards.programs.confine import FILE_BYTES

# Libraries of numbers start a thread for each CPU.
THREADS = 64 + (os.cpu_count() or 1)
_WRITTEN_BYTES = 4 * FILE_BYTES
_ENTRIES = 1024


def too_much(process: int, folder: str) -> bool:
    """Return whether a program has too many threads, has written too much, or has made too many files."""
    return _threads(process) > THREADS or _written(process) > _WRITTEN_BYTES or _is_full(folder)


def _threads(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # it has ended
        return 0
    return int(stat.rpartition(")")[2].split()[17])


def _written(process: int) -> int:
    """Return the bytes that it has written so far, also to files that it has removed."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return max(int(counts["wchar"]), int(counts["write_bytes"]))  # the second includes files in memory maps


def _is_full(folder: str) -> bool:
    entries = used = 0
    left = [folder]
    while left:
        try:
            found = list(os.scandir(left.pop()))
        except OSError:  # removed meanwhile, or without permission
            continue
        for entry in found:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            used += status.st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.path)
        entries += len(found)
        if entries > _ENTRIES or used > _WRITTEN_BYTES:
            return True
    return False
