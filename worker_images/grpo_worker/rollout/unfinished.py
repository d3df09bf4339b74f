"""A sample on its way: the tokens that it has, from one engine or from several, one after the other."""

from array import array
from collections.abc import Mapping
from typing import Any

from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.rollout.sampling import Sample, UnfitEngineError
from grpo_worker.rollout.stream import Chunk

# Tokens between two chunks of a stream: at 14 tokens/s and 8192 streams, less than 2000 chunks a second.
STREAM_INTERVAL = 64


class Unfinished:
    """Tokens, log-probabilities and versions of a sample that is not complete.

    An *attempt* is one request. When it ends early, the next one continues from the prompt and the tokens so
    far. SGLang's seeded sampling depends on the seed and on the position in the sequence alone, so the next
    attempt draws from the same random numbers as an undisturbed one.
    """

    def __init__(
        self,
        prompt: Prompt,
        number: int,
        seed: int,
        params: Mapping[str, Any],
        experts: ExpertLayers | None = None,
    ) -> None:
        """``params``: see sampling.sampling_params. ``experts``: layers whose routed experts are wanted."""
        self.prompt = prompt
        self.number = number
        self._params = dict(params) | {"sampling_seed": seed}
        self._experts = experts
        # Arrays of 4 bytes, as in Sample: Python's numbers in lists take 42 bytes a token and column.
        self._ids = array("i")
        self._log_probs = array("f")
        self._spans: list[tuple[int, int]] = []  # (version, end) of consecutive tokens
        self._base = 0  # tokens of earlier attempts
        self._mixed: int | None = None  # start of a chunk in which the version changed
        self._meta: Mapping[str, Any] = {}

    @property
    def kept(self) -> int:
        """Number of tokens so far."""
        return len(self._ids)

    @property
    def complete(self) -> bool:
        """True if the tokens so far already end the answer."""
        ended = bool(self._ids) and self._ids[-1] in self._params["stop_token_ids"]
        return ended or self.kept >= self._params["max_new_tokens"]

    def request(self, rank: int | None = None) -> dict[str, Any]:
        """Start an attempt and return the body of its ``POST /generate``.

        ``rank``: attention data-parallel rank of the engine; None: its only one.
        """
        self._base, self._mixed = self.kept, None
        budget = {"max_new_tokens": self._params["max_new_tokens"] - self.kept}
        body: dict[str, Any] = {
            "input_ids": [*self.prompt.ids, *self._ids],
            "sampling_params": self._params | budget | {"stream_interval": STREAM_INTERVAL},
            "return_logprob": True,
            "stream": True,
        }
        if rank is not None:
            body["routed_dp_rank"] = rank
        return body | ({"return_routed_experts": True} if self._experts else {})

    def take(self, chunk: Chunk, oldest: int, newest: int | None) -> int:
        """Add the tokens of a chunk and return their number.

        ``oldest``, ``newest``: versions that may have generated them; ``newest`` None: any later one.

        Raises ValueError for tokens of another version or out of order, UnfitEngineError when the engine must
        report the version of each token and does not.
        """
        have = self.kept - self._base
        if chunk.start > have:
            raise ValueError(f"the stream goes from token {have} to token {chunk.start}")
        spans = self._reported(chunk, newest is None)
        wrong = [v for v, _ in spans if v < oldest or (newest is not None and v > newest)]
        if wrong:
            raise ValueError(f"sampled with version {wrong[0]}, expected {oldest}")
        if self._mixed is None and have and self._spans[-1][0] != spans[0][0]:
            self._mixed = self.kept
        fresh = array("i", chunk.ids[have - chunk.start :])
        log_probs = array("f", chunk.log_probs[have - chunk.start :])
        self._ids += fresh
        self._log_probs += log_probs
        if chunk.finished:  # the engine's own list replaces what was noted on the way
            self._spans = [(v, min(end, self._base)) for v, end in self._spans]
            self._meta = chunk.meta
        for version, end in spans:
            self._note(version, end)
        return len(fresh)

    def cut(self, trusted: bool = True) -> None:
        """End an attempt early: keep its tokens for the next one, unless they are not ``trusted``.

        A chunk in which the version changed is dropped: only the last chunk of an answer would tell where.
        With routed experts nothing is kept: another engine would return experts of its own for tokens that it
        has not generated. With stop texts the last tokens are generated again, because an engine finds a text
        only in tokens that it has generated itself.
        """
        keep = self._base if not trusted else self.kept if self._mixed is None else self._mixed
        if self._experts is not None:
            keep = 0
        elif stop := self._params.get("stop"):
            keep = max(self._base, keep - max(len(text.encode()) for text in stop))
        del self._ids[keep:], self._log_probs[keep:]
        self._spans = [(v, min(end, keep)) for v, end in self._spans]
        self._tidy()

    def sample(self, engine: str) -> Sample:
        """Return the complete sample. ``engine``: name of the last engine.

        Raises ValueError when the engine returned no routed experts, or too few.
        """
        oldest = min((version for version, _ in self._spans), default=0)
        spans = tuple(self._spans) if len(self._spans) > 1 else ()
        routed = None
        if self._experts is not None:
            routed = self._experts.reference(dict(self._meta), len(self.prompt.ids) + self.kept - 1)
        return Sample(
            self.prompt.index, self.number, self._ids, self._log_probs, oldest, engine, spans,
            routed,
        )  # fmt: skip

    def _reported(self, chunk: Chunk, required: bool) -> list[tuple[int, int]]:
        """Return (version, end) of the attempt's tokens, as the chunk reports them.

        SGLang reports the version of each token in the last chunk; in others, and before 0.5.23 in all, it
        reports the version of the last token only.
        """
        end = self._base + chunk.start + len(chunk.ids)
        if not chunk.finished:
            return [(int(chunk.meta["weight_version"]), end)]
        if "weight_versions" in chunk.meta:
            return [(int(s["version"]), self._base + int(s["end"])) for s in chunk.meta["weight_versions"]]
        if required:
            raise UnfitEngineError("it does not report the weight version of each token")
        return [(int(chunk.meta["weight_version"]), end)]

    def _note(self, version: int, end: int) -> None:
        self._spans.append((version, end))
        self._tidy()

    def _tidy(self) -> None:
        """Drop empty spans and join neighbours of the same version."""
        tidy: list[tuple[int, int]] = []
        for version, end in self._spans:
            if end <= (tidy[-1][1] if tidy else 0):
                continue
            if tidy and tidy[-1][0] == version:
                tidy.pop()
            tidy.append((version, end))
        self._spans = tidy
