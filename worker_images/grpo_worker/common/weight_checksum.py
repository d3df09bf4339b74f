"""Checksum of the weights in an engine, by which the controller compares engines. Pure.

It is the sum of all bytes as signed numbers, so it does not depend on the order in which they came or on who received them.
Transfers are verified by fingerprints and digests; the checksum shows engines that hold different versions.
"""

from collections.abc import Iterable

_MODULUS = 1 << 64


def checksum(nbytes: int, total: int) -> str:
    """Return the checksum of ``nbytes`` bytes whose sum is ``total``."""
    return f"{nbytes}:{total % _MODULUS:016x}"


def conflict(checksums: Iterable[str]) -> bool:
    """Return whether two checksums of equally many bytes differ.

    An engine that drafts keeps more of a version than one that does not, so its checksum is over more bytes.
    """
    sums: dict[str, str] = {}
    return any(sums.setdefault(each.rpartition(":")[0], each) != each for each in checksums)
