"""The tokenizer of a model: its own ``tokenizer.json``, or the small one committed here."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

TINY = Path(__file__).parent / "tiny_tokenizer.json"


class TextTokenizer:
    """Text <-> token ids. ``eos_id`` ends a response."""

    def __init__(self, file: Path, eos_id: int, pad_id: int) -> None:
        self._file = file
        self._tokenizer = Tokenizer.from_file(str(file))
        self._chat: Any = None
        self.eos_id = eos_id
        self.pad_id = pad_id

    @property
    def digest(self) -> str:
        """Digest of the vocabulary and of the chat template."""
        folder = self._file.parent
        parts = [self._file, folder / "tokenizer_config.json", folder / "chat_template.jinja"]
        data = b"".join(part.read_bytes() for part in parts if part.is_file())
        return hashlib.sha256(data).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages (role, content) by the model's chat template, ready for its answer.

        Raises ValueError when the model has none.
        """
        if self._chat is None:
            from transformers import AutoTokenizer

            if not (self._file.parent / "tokenizer_config.json").is_file():
                raise ValueError(
                    f"spec.model.path: {self._file.parent} has no tokenizer_config.json, thus no chat "
                    "template: give prompts as text instead of messages"
                )
            self._chat = AutoTokenizer.from_pretrained(self._file.parent)
        text = self._chat.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of a response, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def load_tokenizer(model_path: str, eos_id: int, pad_id: int) -> TextTokenizer:
    """Tokenizer of ``preset:...`` or of a Hugging Face directory.

    Raises FileNotFoundError when the directory has no ``tokenizer.json``.
    """
    file = TINY if model_path.startswith("preset:") else Path(model_path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"spec.model.path: no tokenizer.json in {model_path}")
    return TextTokenizer(file, eos_id, pad_id)
