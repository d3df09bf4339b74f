"""Samples that jobs of the end-to-end tests keep in their store."""

from collections.abc import Sequence
from typing import Any

from grpo_worker.data.tokenizer import load_tokenizer


def assert_ids_are_texts(rows: Sequence[dict[str, Any]]) -> None:
    """Decode the tokens of samples: they are the texts that were judged, with a log-probability each."""
    tokenizer = load_tokenizer("preset:tiny-moe")
    for row in rows:
        assert tokenizer.decode_all([row["prompt_ids"], row["answer_ids"]]) == [row["prompt"], row["answer"]]
        assert len(row["rollout_log_probs"]) == len(row["answer_ids"]) > 0
    assert rows, "no sample was kept"
