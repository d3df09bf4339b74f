"""Intervals of steps of equal width, which doubles when there are too many of them (pure)."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Buckets(Generic[T]):
    """Values by interval: a run of any length has at most ``most`` intervals, and of each only one value.

    ``merge``: returns what is kept of two values. ``width``: steps of an interval.
    """

    def __init__(self, most: int, merge: Callable[[T, T], T]) -> None:
        self._most, self._merge = most, merge
        self._values: dict[int, T] = {}
        self.width = 1

    def add(self, step: int, value: T) -> None:
        """Add the value of a step."""
        self._put(self._values, step // self.width, value)
        while len(self._values) > self._most:
            self.widen(2 * self.width)

    def widen(self, width: int) -> None:
        """Make the intervals ``width`` steps wide, a multiple of what they are."""
        factor, before = width // self.width, self._values
        self.width, self._values = width, {}
        for place, value in before.items():
            self._put(self._values, place // factor, value)

    def values(self) -> list[T]:
        """Return the values in the order of the steps."""
        return [self._values[place] for place in sorted(self._values)]

    def _put(self, values: dict[int, T], place: int, value: T) -> None:
        values[place] = self._merge(values[place], value) if place in values else value
