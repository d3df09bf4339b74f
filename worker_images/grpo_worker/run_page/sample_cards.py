"""Prompts and answers as a page shows them, cut to a bounded size (pure)."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.token_texts import Decode, token_texts

_KEPT = ("uid", "score", "verifier_score", "advantage", "dropped", "version", "engine", "log_prob_gap_mean")


def cut(text: str, most: int) -> str:
    """Return the beginning and the end of a text of more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters are left out …\n{text[-half:]}"


def answer_card(row: Mapping[str, Any], decode: Decode | None, limits: Limits) -> dict[str, Any]:
    """Return an answer's figures, text and tokens. ``row``: of the samples' file, which may be an old one.

    ``decode``: None where there is no tokenizer; tokens have their ids then.
    """
    ids = row["answer_ids"] or []
    kept = _ends(len(ids), limits.tokens)
    chosen = [ids[at] for at in kept]
    return {name: _finite(row[name]) for name in _KEPT} | {
        "parts": {name: _finite(value) for name, value in (row.get("reward_parts") or {}).items()},
        "length": len(ids),
        "spans": [[span["version"], span["end"]] for span in row["spans"] or []][: limits.answers],
        "text": cut(row["answer"] or "", limits.characters),
        "tokens": {
            "first": len(kept) if len(kept) == len(ids) else limits.tokens // 2,  # the others are the end
            "pieces": token_texts(chosen, decode) if decode else [str(token) for token in chosen],
            "trainer": _at(row["old_log_probs"], kept),
            "engine": _at(row["rollout_log_probs"], kept),
        },
    }


def group_card(
    rows: Sequence[Mapping[str, Any]], answers: int, decode: Decode | None, limits: Limits
) -> dict[str, Any]:
    """Return a prompt with the answers in ``rows``. ``answers``: how many there are in all."""
    return {
        "prompt": rows[0]["prompt_index"],
        "text": cut(rows[0]["prompt"] or "", limits.characters),
        "of": answers,
        "answers": [answer_card(row, decode, limits) for row in rows],
    }


def within(steps: Sequence[dict[str, Any]], most: int) -> int:
    """Remove groups, those of each step that say least first, until all are at most ``most`` bytes.

    Returns the number of groups that were removed.
    """
    sizes = [[_bytes(group) for group in step["shown"]] for step in steps]
    removed = 0
    while sum(map(sum, sizes)) > most:
        step = max(range(len(sizes)), key=lambda at: len(sizes[at]))
        sizes[step].pop()
        steps[step]["shown"].pop()
        removed += 1
    return removed


def _bytes(group: dict[str, Any]) -> int:
    return len(json.dumps(group))


def _ends(count: int, most: int) -> list[int]:
    half = most // 2
    return list(range(count)) if count <= most else [*range(half), *range(count - half, count)]


def _at(values: Sequence[float] | None, places: Sequence[int]) -> list[float | None]:
    """Return log-probabilities with four digits, which colors do not show more of; None: there are none."""
    return [None if not values or at >= len(values) else _finite(round(values[at], 4)) for at in places]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
