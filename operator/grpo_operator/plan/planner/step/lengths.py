"""Distribution of response lengths that a plan assumes (pure)."""

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Log-normal lengths, cut off at ``longest`` tokens.

    ``mean``: tokens after the cut. ``sigma``: standard deviation of the logarithm; 0: all are equally long.
    Raises ValueError for a mean that no such distribution has.
    """

    mean: float
    longest: int
    sigma: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.mean <= self.longest:
            raise ValueError(
                f"a mean response of {self.mean:g} tokens is impossible with responseLength={self.longest}: "
                f"use a mean above 0 and up to {self.longest}"
            )
        if self.sigma < 0:
            raise ValueError(f"sigma={self.sigma:g} is negative: use 0 or more")

    def sample(self, count: int) -> list[float]:
        """Return ``count`` lengths at equal steps of probability, in ascending order: nothing is drawn."""
        shapes = self._shapes(count)
        low, high = 0.0, float(self.longest) * 1e9
        for _ in range(200):
            scale = math.sqrt(low * high) if low else high / 2
            if self._mean(shapes, scale) < self.mean:
                low = scale
            else:
                high = scale
        return [min(shape * high, float(self.longest)) for shape in shapes]

    def _shapes(self, count: int) -> list[float]:
        normal = NormalDist()
        return [math.exp(self.sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]

    def _mean(self, shapes: list[float], scale: float) -> float:
        return sum(min(shape * scale, self.longest) for shape in shapes) / len(shapes)
