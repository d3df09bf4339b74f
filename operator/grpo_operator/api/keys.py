"""Keys by which the pods of a job, of a pool, and the operator know each other (pure).

The operator derives the key of each job, and of each pool without a job, from the namespace's master key. No
key is sent: a caller sends a token, which it derives from its key and the namespace's epoch. A new epoch
therefore replaces all tokens of a namespace, although the keys in the pods stay as they are.
"""

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_operator.api import names

OVERLAP_SECONDS = 300  # kubelet updates a mounted Secret within two or three minutes


def owner_key(master: str, owner: dict[str, Any]) -> str:
    """Return the key of a GRPOJob, or of a RolloutPool without a job.

    That of a job belongs to its UID, so that no later job of the name has it. That of a pool belongs to its
    name: a job that uses the pool keeps its own Secret when the pool is replaced.
    """
    meta = owner["metadata"]
    identity = meta["uid"] if owner["kind"] == "GRPOJob" else meta["name"]
    return _derived(master, f"{owner['kind']}/{identity}")


def pair_key(pool_key: str, writer: str) -> str:
    """Return the key between a shared pool and one job that uses it. ``writer``: identity of the job."""
    return _derived(pool_key, f"writer/{writer}")


def token(key: str, epoch: str) -> str:
    """Return what a caller with this key sends in an epoch."""
    return _derived(key, f"epoch/{epoch}")


def generate_key(key: str) -> str:
    """Return the key of an engine's server for calls that are no control calls. ``key``: of its owner."""
    return _derived(key, "generate")


def api_key(master: str, pool: dict[str, Any]) -> str:
    """Return the key of requests to a pool that serves its model; a later pool of the name has another."""
    return _derived(master, f"api/{pool['metadata']['uid']}")


def secret_data(master: str, owner: dict[str, Any], pool: str | None) -> dict[str, str]:
    """Return the content of an owner's Secret. ``pool``: name of the shared pool that a job uses."""
    data = {names.KEY: owner_key(master, owner)}
    if pool is None:
        return data
    shared = {"kind": "RolloutPool", "metadata": {"name": pool}}
    return data | {names.PAIR_KEY: pair_key(owner_key(master, shared), names.writer(owner))}


@dataclass(frozen=True, slots=True)
class Epochs:
    """The newest epoch of a namespace and the one before. ``since``: when the newest began (Unix time).

    ``overlap``: seconds within which all pods see a new epoch. A caller uses the previous epoch for so long,
    and a server accepts it for twice as long. Clocks must agree to within this time, too.
    """

    newest: str
    since: float
    previous: str | None = None
    overlap: float = OVERLAP_SECONDS

    def __post_init__(self) -> None:
        """Raise ValueError for an epoch without a value, or for an overlap that is no time."""
        if not self.newest or not self.overlap > 0:
            raise ValueError(f"an epoch needs a value, and an overlap above 0 seconds, not {self.overlap}")

    def sent(self, now: float) -> str:
        """Return the epoch that a caller uses: the newest only when all servers have seen it."""
        return self.previous if self.previous and now < self.since + self.overlap else self.newest

    def accepted(self, now: float) -> tuple[str, ...]:
        """Return the epochs that a server accepts: the previous one until no caller uses it."""
        return (self.newest,) if self.previous is None or self.settled(now) else (self.newest, self.previous)

    def settled(self, now: float) -> bool:
        """Return whether the previous epoch has ended. Before that no other one may begin."""
        return self.previous is None or now >= self.since + 2 * self.overlap

    def next(self, value: str, now: float, overlap: float) -> "Epochs":
        """Return the epochs after a new one has begun."""
        return replace(self, newest=value, since=now, previous=self.newest, overlap=overlap)

    def text(self) -> str:
        """Return the epochs as they are written into the Secret."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Epochs":
        """Return the epochs in a Secret. Fields of later releases are ignored. Raises ValueError."""
        try:
            data = json.loads(text)
            previous = data.get("previous")
            return cls(
                str(data["newest"]), float(data["since"]), previous and str(previous), float(data["overlap"])
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the epochs of a namespace: {error!r}") from error


def _derived(key: str, purpose: str) -> str:
    return hmac.new(key.encode(), purpose.encode(), hashlib.sha256).hexdigest()
