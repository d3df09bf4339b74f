"""The tokenizer of a model: its own ``tokenizer.json``, or the small one committed here."""

from pathlib import Path

from tokenizers import Tokenizer

TINY = Path(__file__).parent / "tiny_tokenizer.json"


class TextTokenizer:
    """Text <-> token ids. ``eos_id`` ends a response."""

    def __init__(self, file: Path, eos_id: int, pad_id: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(file))
        self.eos_id = eos_id
        self.pad_id = pad_id

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

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
