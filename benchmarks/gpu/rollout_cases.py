"""Cases of rollout_speed.py: prompts, groups and the length of each answer (pure)."""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

VERSION = 0  # of the weights that the engine starts with


@dataclass(frozen=True, slots=True)
class RolloutCase:
    """A step's prompts. ``lengths``: tokens of each answer, the same within a group, by prompt.

    ``characters``: of a prompt, which the tiny tokenizer turns into about as many tokens.
    """

    samples: int
    characters: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens that the engine generates in a round."""
        return self.samples * sum(self.lengths)

    def texts(self) -> list[str]:
        """Return prompts that share no beginning."""
        numbers = random.Random(self.characters)
        return ["".join(numbers.choices("0123456789", k=self.characters)) for _ in self.lengths]


def long_tail(count: int, median: int, longest: int, spread: float = 0.8) -> tuple[int, ...]:
    """Return log-normal lengths in a random order; the longest one has ``longest`` tokens."""
    normal = NormalDist(math.log(median), spread)
    quantiles = (normal.inv_cdf((number + 0.5) / count) for number in range(count))
    lengths = [min(longest, round(math.exp(quantile))) for quantile in quantiles]
    lengths[-1] = longest
    random.Random(count).shuffle(lengths)
    return tuple(lengths)


GPU_CASES = {
    "many requests": RolloutCase(samples=8, characters=256, lengths=(64,) * 128),
    "long tail": RolloutCase(samples=8, characters=256, lengths=long_tail(64, 96, 512)),
    "large groups": RolloutCase(samples=16, characters=512, lengths=(128,) * 16),
}
CPU_CASES = {
    "many requests": RolloutCase(samples=8, characters=16, lengths=(16,) * 32),
    "long tail": RolloutCase(samples=8, characters=16, lengths=long_tail(16, 12, 64)),
    "large groups": RolloutCase(samples=16, characters=32, lengths=(24,) * 8),
}
