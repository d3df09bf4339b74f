"""Samples of a step as text (pure)."""

from collections.abc import Iterable, Iterator
from typing import Any

from grpo_operator.cli.kubectl.plain_text import printable

_INDENT = " " * 4


def sample_lines(samples: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of each sample: figures, the prompt when it is another one, and the answer."""
    shown: Any = None
    for sample in samples:
        prompt = sample.get("set"), sample["prompt_index"]  # training samples have no set
        if prompt != shown:
            shown = prompt
            of = f"{printable(prompt[0])}, " if prompt[0] else ""
            yield f"PROMPT {prompt[1]} of {of}step {sample['step']}"
            yield from _indented(sample["prompt"])
        yield _figures(sample)
        yield from _indented(sample["answer"])


def _figures(sample: dict[str, Any]) -> str:
    if sample["uid"] is None:
        return f"NO ANSWER: {sample['dropped']}"
    parts = [f"ANSWER {sample['uid']}"]
    for label, name in (
        ("score", "score"),
        ("advantage", "advantage"),
        ("log-prob gap", "log_prob_gap_mean"),
    ):
        if sample[name] is not None:
            parts.append(f"{label} {sample[name]:.4g}{_of_score(sample) if name == 'score' else ''}")
    parts += [f"version {sample['version']}", f"engine {sample['engine']}"]
    if sample["dropped"]:
        parts.append(f"not trained on: {sample['dropped']}")
    return ", ".join(parts)


def _of_score(sample: dict[str, Any]) -> str:
    """Return the parts of the reward in brackets; files of older controllers have none."""
    parts = sample.get("reward_parts") or {}
    shown = ", ".join(f"{printable(name)} {value:.4g}" for name, value in parts.items())
    return f" ({shown})" if shown else ""


def _indented(text: str | None) -> Iterator[str]:
    return (_INDENT + line for line in printable(text or "").splitlines())
