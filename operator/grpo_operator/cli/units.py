"""Amounts as people read them, in a unit that suits their size (pure)."""

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_GIB, _MIB = 2**30, 2**20


def size(amount: float) -> str:
    """Return bytes with three digits, such as 5.80 TB or 429 kB."""
    for factor, unit in _BYTES:
        if amount >= factor:
            return f"{_three_digits(amount / factor)} {unit}"
    return f"{amount:.0f} bytes"


def binary_size(amount: float) -> str:
    """Return bytes in GiB, or in MiB below one of them."""
    if 0 < amount < _GIB:
        return f"{amount / _MIB:.0f} MiB"
    return f"{amount / _GIB:.{0 if amount == 0 or amount >= 10 * _GIB else 1}f} GiB"


def duration(seconds: float) -> str:
    """Return whole seconds, and two digits of less than ten."""
    if 0 < seconds < 1e-3:
        return "less than 1 ms"
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.2g} s"


def count(number: int, what: str) -> str:
    """Return a number of things, such as 1 node or 2 nodes."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
