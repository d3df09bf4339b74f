"""How an agent asks its engine for a direct load: what stands in SGLang's own fields."""

import json
from dataclasses import asdict, dataclass

PREFIX = "grpo:"
MARK = "[grpo direct loading]"


@dataclass(frozen=True, slots=True)
class DirectLoad:
    """One version in buckets. ``counts``: tensors of each bucket, in the order of the request's names;
    ``fingerprints``: of each bucket's bytes. ``plan_id``: same names, shapes and buckets, same id."""

    plan_id: str
    counts: tuple[int, ...]
    fingerprints: tuple[int, ...]

    def to_load_format(self) -> str:
        return PREFIX + json.dumps(asdict(self))

    @classmethod
    def from_load_format(cls, text: str) -> "DirectLoad":
        """Raises ValueError for anything else."""
        try:
            data = json.loads(text.removeprefix(PREFIX))
            return cls(data["plan_id"], tuple(data["counts"]), tuple(data["fingerprints"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"load_format {text[:80]!r} is no direct load") from error
