"""Stragglers: ranks whose own computing is slower than that of others with the same work (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from grpo_operator.api.messages import Straggler
from grpo_operator.api.v1alpha1.restart_policy import StragglerPolicy
from grpo_operator.api.v1alpha1.status import MAX_STRAGGLERS
from grpo_worker.profiling.own_time import OwnTime
from grpo_worker.roles.dispatch import RankInfo
from grpo_worker.roles.host import RankHost


@dataclass(frozen=True, slots=True)
class Member:
    """One rank. ``peers``: number of its pipeline stage, whose ranks compute the same layers."""

    rank: int
    peers: int
    pod: str


def members_of(ranks: Sequence[RankInfo], hosts: Sequence[RankHost]) -> list[Member]:
    """Return the members of a gang in the order of their ranks."""
    return [
        Member(info.rank, info.pp_rank, host.pod or host.address)
        for info, host in zip(ranks, hosts, strict=True)
    ]


class StragglerWatch:
    """Own times of one gang, step by step. ``stragglers``: those of the last step, the slowest first.

    A rank is compared with the lower median of its pipeline stage, so that one of two can be named. It is a
    straggler after ``steps`` slow steps in a row, and no longer after a step that is not slow.
    """

    def __init__(self, policy: StragglerPolicy, members: Sequence[Member]) -> None:
        self._policy = policy
        self._members = members
        self._slow = [0] * len(members)  # steps in a row, by position
        self.stragglers: list[Straggler] = []
        self.count = 0

    @property
    def new(self) -> list[Straggler]:
        """Return those that have become stragglers in the last step."""
        return [one for one in self.stragglers if one.steps == self._policy.steps]

    def observe(self, times: Sequence[OwnTime]) -> dict[str, float]:
        """Record a step of all members; return its metrics, whose number does not grow with the gang."""
        ratios = self._ratios([time.log_probs + time.update for time in times])
        for place, ratio in enumerate(ratios):
            self._slow[place] = self._slow[place] + 1 if ratio > self._policy.factor else 0
        named = [place for place, steps in enumerate(self._slow) if steps >= self._policy.steps]
        named.sort(key=lambda place: -ratios[place])
        self.count = len(named)
        self.stragglers = [self._straggler(place, ratios[place]) for place in named[:MAX_STRAGGLERS]]
        return {
            **_spread("log_probs", [time.log_probs for time in times]),
            **_spread("update", [time.update for time in times]),
            "own_time_s/largest_ratio": max(ratios, default=1.0),
            "own_time_s/stragglers": float(self.count),
        }

    def _ratios(self, seconds: Sequence[float]) -> list[float]:
        """Return each member's time in relation to the lower median of its peers."""
        by_peers: dict[int, list[float]] = {}
        for member, own in zip(self._members, seconds, strict=True):
            by_peers.setdefault(member.peers, []).append(own)
        medians = {peers: median_low(group) for peers, group in by_peers.items()}
        pairs = [(own, medians[m.peers]) for m, own in zip(self._members, seconds, strict=True)]
        return [own / middle if middle > 0 else 1.0 for own, middle in pairs]

    def _straggler(self, place: int, ratio: float) -> Straggler:
        member = self._members[place]
        return Straggler(rank=member.rank, pod=member.pod, ratio=round(ratio, 1), steps=self._slow[place])


def _spread(phase: str, seconds: Sequence[float]) -> dict[str, float]:
    name = f"own_time_s/{phase}"
    least, most = min(seconds, default=0.0), max(seconds, default=0.0)
    return {f"{name}_min": least, f"{name}_median": median_low(seconds or [0.0]), f"{name}_max": most}
