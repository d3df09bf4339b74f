"""Greedy answers of transformers to prompts: what engines must answer with the same model."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def exported_model(folder: Path) -> Any:
    """Load an export in float32, as a model that no token ends."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as with ignore_eos; min_new_tokens would forbid the token
    return model


def greedy(model: Any, prompt: Sequence[int], tokens: int, ends: Collection[int] = ()) -> list[int]:
    """Return the likeliest tokens after a prompt, to the first one of ``ends`` or to so many."""
    found = model.generate(torch.tensor([list(prompt)]), max_new_tokens=tokens, do_sample=False)
    return _until_end(found[0, len(prompt) :].tolist(), ends)


def _until_end(answer: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return an answer up to its first token of ``ends``, and with it."""
    last = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return list(answer[: last + 1])
