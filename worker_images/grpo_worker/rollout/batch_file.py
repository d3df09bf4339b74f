"""Prompts, samples and scores of one step, in memory and in a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from zipfile import ZipFile

import numpy as np

from grpo_worker.common.known_fields import known
from grpo_worker.common.object_stream import object_stream
from grpo_worker.common.reward_parts import part_columns, with_parts
from grpo_worker.common.store_path import StorePath, patiently
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.rollout.sampling import Sample

if TYPE_CHECKING:
    from upath import UPath


@dataclass(slots=True)
class RolloutBatch:
    """Samples of one step, group by group, and the score of each sample, a Reward where it has named parts.

    ``taken``: all prompts drawn for the step, including those of dropped groups. ``left_out``: samples of
    dropped groups, whose scores are all equal and give no gradient. ``refused``: reason by the index of each
    prompt that engines refused. ``cut``: number of groups left to the next step (overSampleRate).
    """

    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    taken: list[Prompt] = field(default_factory=list)
    left_out: list[Sample] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    cut: int = 0

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest weight version that generated a token of the samples."""
        newest = max(sample.spans[-1][0] if sample.spans else sample.version for sample in self.samples)
        return min(sample.version for sample in self.samples), newest

    def write(self, path: StorePath) -> None:
        """Write the batch to ``path`` as .npz, atomically."""
        if not isinstance(path, Path):
            patiently(lambda: self._upload(path), f"writing {path}")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as handle:
            np.savez(handle, **self._arrays())  # type: ignore[arg-type]
        temporary.rename(path)

    def _upload(self, path: "UPath") -> None:
        # np.savez wants to read what it writes.
        with object_stream(path) as stream, ZipFile(cast(IO[bytes], stream), "w") as archive:
            for name, array in self._arrays().items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)  # type: ignore[no-untyped-call]

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {
            "prompts": np.array([p.index for p in self.prompts], dtype=np.int64),
            "scores": np.array(self.scores, dtype=np.float64),
            "taken": np.array([p.index for p in self.taken], dtype=np.int64),
            "taken_lengths": np.array([len(p.ids) for p in self.taken], dtype=np.int64),
            "taken_ids": _flat([p.ids for p in self.taken], np.int32),
            "cut": np.array(self.cut, dtype=np.int64),
            "refused": np.array(list(self.refused), dtype=np.int64),
            "refused_reasons": np.array(list(self.refused.values()), dtype=np.str_),
        }
        for name, samples in (("samples", self.samples), ("left_out", self.left_out)):
            arrays |= {f"{name}_{key}": value for key, value in _columns(samples).items()}
        return arrays | part_columns(self.scores)

    @classmethod
    def read(cls, path: StorePath) -> "RolloutBatch":
        """Read a file that ``write`` produced."""
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            arrays = dict(data)
        ids = np.split(arrays["taken_ids"], np.cumsum(arrays["taken_lengths"])[:-1])
        taken = [
            Prompt(int(index), tuple(int(i) for i in row))
            for index, row in zip(arrays["taken"], ids, strict=True)
        ]
        by_index = {prompt.index: prompt for prompt in taken}
        return cls(
            [by_index[int(index)] for index in arrays["prompts"]],
            _samples(arrays, "samples"),
            with_parts(arrays["scores"].tolist(), arrays),
            taken,
            _samples(arrays, "left_out"),
            _refused(arrays),
            int(arrays.get("cut", 0)),
        )


def _flat(rows: Sequence[Sequence[float]], dtype: Any) -> np.ndarray:
    parts = [np.asarray(row, dtype=dtype) for row in rows]
    return np.concatenate([np.empty(0, dtype), *parts])


def _columns(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    columns = {
        "prompt": np.array([s.prompt_index for s in samples], dtype=np.int64),
        "number": np.array([s.number for s in samples], dtype=np.int64),
        "version": np.array([s.version for s in samples], dtype=np.int64),
        "engine": np.array([s.engine for s in samples], dtype=np.str_),
        "lengths": np.array([len(s.ids) for s in samples], dtype=np.int64),
        "ids": _flat([s.ids for s in samples], np.int32),
        "log_probs": _flat([s.log_probs for s in samples], np.float32),
        "spans": np.array([span for s in samples for span in s.spans], dtype=np.int64).reshape(-1, 2),
        "span_counts": np.array([len(s.spans) for s in samples], dtype=np.int64),
    }
    routed = [json.dumps(s.routed.to_json()) for s in samples if s.routed is not None]
    if routed:
        columns["routed"] = np.array(routed, dtype=np.str_)
    return columns


def _refused(arrays: dict[str, np.ndarray]) -> dict[int, str]:
    if "refused" not in arrays:  # a file of an older controller
        return {}
    pairs = zip(arrays["refused"], arrays["refused_reasons"], strict=True)
    return {int(index): str(reason) for index, reason in pairs}


def _samples(arrays: dict[str, np.ndarray], name: str) -> list[Sample]:
    column = {key.removeprefix(f"{name}_"): v for key, v in arrays.items() if key.startswith(f"{name}_")}
    count = len(column["prompt"])
    if count == 0:
        return []
    cuts = np.cumsum(column["lengths"])[:-1]
    ids, log_probs = np.split(column["ids"], cuts), np.split(column["log_probs"], cuts)
    spans = np.split(column["spans"], np.cumsum(column["span_counts"])[:-1])
    routed: list[RoutedExperts | None] = [None] * count
    if "routed" in column:
        routed = [RoutedExperts(**known(RoutedExperts, json.loads(str(text)))) for text in column["routed"]]
    return [
        Sample(
            int(column["prompt"][i]),
            int(column["number"][i]),
            ids[i].tolist(),
            log_probs[i].tolist(),
            int(column["version"][i]),
            str(column["engine"][i]),
            tuple((int(version), int(end)) for version, end in spans[i]),
            routed[i],
        )
        for i in range(count)
    ]
