"""Processes that tests look at."""

from pathlib import Path


def runs(pid: int) -> bool:
    """Is there such a process, and not a zombie?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
