"""Direct load: the request by which an agent lets its engine load a whole version. Pure.

It travels in fields of SGLang's own route ``/update_weights_from_distributed``.
"""

import json
from dataclasses import asdict, dataclass

PREFIX = "grpo:"  # of a load_format that announces a version of this project
LINK_LOAD = "grpo:link:"  # of one that comes over a link; the seconds of patience for a wave follow
LINK_INSTALL = "grpo:install:"  # of one that was fetched over a link; the version follows
MARK = "[grpo direct loading]"  # in the answer of an engine that supports direct loads
KEPT = "[grpo weights kept]"  # in the answer of an engine that did not overwrite its weights when it joined
LINK = "grpo-link-"  # prefix of a link's name; the gang's identity follows
FETCH = "grpo-fetch-"  # prefix of a name that is a request to fetch a version; see Fetch
FETCHED = "[grpo fetched]"  # in the answer of an engine that has the version in its second copy
AGENT = "grpo-weights-"  # prefix of the name of a group of one agent and its engine
_PATIENCE = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Fetch:
    """Request to receive a version into the engine's second copy while it generates, or to ask how far it is.

    It travels as the name of a group in SGLang's route ``/init_weights_update_group``, which its scheduler
    answers without an interruption of generation. ``patience``: seconds that a rank waits for a wave.
    """

    link: str
    version: str
    patience: float

    def to_group_name(self) -> str:
        """Return the text for the request's field ``group_name``."""
        return FETCH + json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_group_name(cls, text: str) -> "Fetch":
        """Parse the output of ``to_group_name``. Raises ValueError for any other text."""
        try:
            data = json.loads(text.removeprefix(FETCH))
            return cls(str(data["link"]), str(data["version"]), float(data["patience"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"group_name {text[:80]!r} is no request to fetch a version") from error


@dataclass(frozen=True, slots=True)
class DirectLoad:
    """Announcement of a version whose buckets the agent streams.

    ``plan_id``: equal for requests with equal names, shapes and buckets.
    ``counts``: number of tensors of each bucket, in the order of the request's names.
    ``record``: before the load, the engine records what it keeps of each tensor, for later links.
    ``parts``: each rank records it too, tells the agent, and receives only that.
    ``patience``: seconds that a rank waits for a byte; the agent gives up before.
    """

    plan_id: str
    counts: tuple[int, ...]
    record: bool = False
    parts: bool = False
    patience: float = _PATIENCE

    def to_load_format(self) -> str:
        """Return the text for the request's field ``load_format``."""
        return PREFIX + json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_load_format(cls, text: str) -> "DirectLoad":
        """Parse the output of ``to_load_format``. Raises ValueError for any other text."""
        try:
            data = json.loads(text.removeprefix(PREFIX))
            flags = bool(data.get("record")), bool(data.get("parts"))
            patience = float(data.get("patience", _PATIENCE))
            return cls(data["plan_id"], tuple(data["counts"]), *flags, patience)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"load_format {text[:80]!r} is no direct load") from error
