"""Choice of the tokens that end a response and of the token for padding (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens of a model.

    ``end``: tokens that end a response, the model's own first. ``pad``: token for padding, which is always
    masked.
    """

    end: tuple[int, ...]
    pad: int


def special_tokens(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizer: Mapping[str, int | None],
    more: Iterable[int] = (),
) -> SpecialTokens:
    """Return the special tokens of a model.

    ``config``, ``generation``: contents of config.json and generation_config.json. ``tokenizer``: its
    eos_token_id and pad_token_id. ``more``: algorithm.stopTokenIds.

    A response ends at every token that any of these sources names, as in transformers and SGLang;
    generation_config.json comes first. The pad token is the first one of tokenizer, generation_config.json
    and config.json, else the first end token.

    Raises ValueError when no token ends a response, or when such a token is outside of the vocabulary.
    """
    named = [*(_ids(source.get("eos_token_id")) for source in (generation, config, tokenizer)), tuple(more)]
    end = tuple(dict.fromkeys(token for tokens in named for token in tokens))
    if not end:
        raise ValueError(
            "generation_config.json, config.json and tokenizer_config.json name no token that ends a "
            "response (eos_token_id): set algorithm.stopTokenIds"
        )
    size = int(config["vocab_size"])
    for token in end:
        if not 0 <= token < size:
            raise ValueError(
                f"eos_token_id={token} is outside of the vocabulary of {size} tokens (vocab_size): correct "
                "it in generation_config.json, config.json, the tokenizer's files or algorithm.stopTokenIds"
            )
    pads = (token for source in (tokenizer, generation, config) for token in _ids(source.get("pad_token_id")))
    return SpecialTokens(end, next((token for token in pads if 0 <= token < size), end[0]))


def _ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of a field that is absent, one token, or a list of tokens."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list | tuple) else (int(value),)
