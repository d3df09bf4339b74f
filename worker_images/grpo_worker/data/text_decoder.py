"""Conversion of token ids to text, apart from transformers, which takes seconds to import."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """Text of token ids. Can be pickled."""

    tokenizer: Tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
