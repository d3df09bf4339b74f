"""Stand-in for the object store of the training pods, which counts what each pod fetches."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Stored:
    """An argument in the object store. ``nbytes``: its size; each pod that reads it fetches it once.

    ``pod``: training pod that holds it; "": the controller's pod does.
    """

    number: int
    value: Any
    nbytes: int
    pod: str = ""


@dataclass(slots=True)
class StandInObjectStore:
    """Objects and the pods that have fetched them. ``nbytes``: by link, to which fetched bytes are added."""

    nbytes: Counter[str]
    _fetched: set[tuple[str, int]] = field(default_factory=set)  # (pod, number of an object)
    _numbers: "count[int]" = field(default_factory=count)

    def put(self, value: Any) -> Stored:
        """Store a value in the controller's pod."""
        return Stored(next(self._numbers), value, size_of(value))

    def pass_on(self, pod: str, stored: Stored) -> Stored:
        """Copy an object to a pod, which fetches it first."""
        self.fetch(pod, stored)
        copy = replace(stored, number=next(self._numbers), pod=pod)
        self._fetched.add((pod, copy.number))
        return copy

    def fetch(self, pod: str, stored: Stored) -> None:
        """Count the bytes that a pod fetches from the pod that holds an object."""
        if (pod, stored.number) not in self._fetched:
            self._fetched.add((pod, stored.number))
            self.nbytes["trainer>trainer" if stored.pod else "controller>trainer"] += stored.nbytes


def experts_in(value: Any) -> int:
    """Return the bytes of experts in a value: arrays [layers, tokens, k], as nothing else has three axes."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes) if value.ndim >= 3 else 0
    if isinstance(value, dict):
        return sum(map(experts_in, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(experts_in, value))
    slots = getattr(value, "__dataclass_fields__", None)
    return sum(experts_in(getattr(value, name)) for name in slots) if slots else 0


def size_of(value: Any) -> int:
    """Return the bytes of the arrays in a value, or of its text."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(item) for item in value)
    slots = getattr(value, "__dataclass_fields__", None)
    return sum(size_of(getattr(value, name)) for name in slots) if slots else 8
