"""Model of continuous batching: who runs, for how long, and with how much KV cache (pure).

Like SGLang's scheduler, each attention data-parallel rank admits requests in order while its batch and its
KV cache have room, reads their prompts, and gives every running sequence one token at a time. When the cache
is full it retracts the sequence with the fewest tokens, which is read again later. The ranks of an engine
compute together, so the fullest one sets the pace. Time passes in blocks of some tokens of all sequences.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of the work of one attention replica, while the engine's other replicas do the same.

    ``decode(running, context)``: one token of ``running`` sequences with ``context`` tokens on average.
    ``prefill(tokens, length)``: ``tokens`` tokens of prompts of ``length`` tokens.
    """

    decode: Callable[[float, float], float]
    prefill: Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one replica. ``running``: sequences at once. ``kv_tokens``: of its KV cache. ``block``: tokens."""

    running: int
    kv_tokens: int
    block: int = 32


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence. ``wanted``: response tokens that it will have; ``tokens``: those that it has.

    ``read``: tokens in the KV cache.
    """

    prompt: int
    wanted: int
    tokens: int = 0
    read: int = 0

    @property
    def missing(self) -> int:
        return self.wanted - self.tokens


@dataclass(slots=True)
class Replica:
    """Sequences of one attention replica, in the order in which they came."""

    capacity: Capacity
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    retractions: int = 0

    @property
    def kv_used(self) -> int:
        return sum(sequence.read for sequence in self.running)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue. Raises ValueError if it can never run."""
        if sequence.prompt + sequence.wanted + self.capacity.block > self.capacity.kv_tokens:
            raise ValueError(
                f"a sequence of {sequence.prompt + sequence.wanted} tokens exceeds the KV cache of "
                f"{self.capacity.kv_tokens}"
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, for example because its client is gone."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def admit(self) -> list[int]:
        """Move sequences from the queue into the batch; return the tokens that are read of each."""
        new: list[int] = []
        used = self.kv_used
        while self.waiting and len(self.running) < self.capacity.running:
            length = self.waiting[0].prompt + self.waiting[0].tokens
            if used + length + self.capacity.block * (len(self.running) + 1) > self.capacity.kv_tokens:
                break
            sequence = self.waiting.popleft()
            sequence.read = length
            used += length
            new.append(length)
            self.running.append(sequence)
        return new

    def retract(self) -> None:
        """Take sequences out until the KV cache has room for a block of each."""
        while len(self.running) > 1 and (
            self.kv_used + self.capacity.block * len(self.running) > self.capacity.kv_tokens
        ):
            victim = min(self.running, key=lambda sequence: sequence.tokens)
            self.running.remove(victim)
            victim.read = 0
            self.waiting.appendleft(victim)
            self.retractions += 1

    def advance(self, tokens: int) -> list[Sequence]:
        """Give every running sequence up to ``tokens`` tokens; return those that got any."""
        moved = self.running
        for sequence in moved:
            got = min(tokens, sequence.missing)
            sequence.tokens += got
            sequence.read += got
        self.running = [sequence for sequence in moved if sequence.missing]
        return moved


class Batch:
    """All replicas of one engine."""

    def __init__(self, replicas: int, capacity: Capacity, speed: Speed) -> None:
        self.replicas = [Replica(capacity) for _ in range(replicas)]
        self._speed = speed
        self._tokens = 0  # of the current block

    @property
    def running(self) -> int:
        return sum(len(replica.running) for replica in self.replicas)

    @property
    def waiting(self) -> int:
        return sum(len(replica.waiting) for replica in self.replicas)

    def add(self, sequence: Sequence, replica: int | None) -> Replica:
        """Queue a sequence at a replica, by default at the least loaded one. Raises ValueError."""
        if replica is None:
            chosen = min(self.replicas, key=lambda candidate: candidate.load)
        elif replica < len(self.replicas):
            chosen = self.replicas[replica]
        else:
            raise ValueError(f"routed_dp_rank={replica} out of range [0, {len(self.replicas)})")
        chosen.add(sequence)
        return chosen

    def clear(self) -> None:
        for replica in self.replicas:
            replica.running, replica.waiting = [], deque()

    def start_block(self) -> float:
        """Admit what fits, and return the seconds of the next block; 0 if nothing runs."""
        longest = 0.0
        new = [replica.admit() for replica in self.replicas]
        for replica in self.replicas:
            replica.retract()
        missing = [sequence.missing for replica in self.replicas for sequence in replica.running]
        if not missing:
            return 0.0
        self._tokens = min(self.replicas[0].capacity.block, max(missing))
        for replica, read in zip(self.replicas, new, strict=True):
            count = len(replica.running)
            if count:
                context = replica.kv_used / count + self._tokens / 2
                seconds = self._tokens * self._speed.decode(count, context)
                if read:
                    seconds += self._speed.prefill(sum(read), sum(read) / len(read))
                longest = max(longest, seconds)
        return longest

    def end_block(self) -> list[Sequence]:
        """Give every running sequence the tokens of the block; return those that got any."""
        return [sequence for replica in self.replicas for sequence in replica.advance(self._tokens)]
