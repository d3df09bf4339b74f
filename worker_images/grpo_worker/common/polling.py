"""Pauses between looks at something that may take milliseconds or minutes (pure)."""

_SHARE, _LONGEST = 0.05, 1.0  # of the seconds waited, and in seconds


def pause_after(waited: float, shortest: float) -> float:
    """Return the seconds until the next look, after ``waited`` seconds.

    A long wait takes few looks, and its end is noticed at most a twentieth of it, or a second, too late.
    """
    return min(max(shortest, _SHARE * waited), _LONGEST)
