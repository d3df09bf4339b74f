"""The tokenizer of a model, from its directory or, for presets, the tiny one committed here."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from grpo_operator.api.catalog.presets import PRESET
from grpo_worker.data.text_decoder import TextDecoder
from grpo_worker.model_files.errors import ModelFilesError
from grpo_worker.model_files.names import TINY_TOKENIZER, TOKENIZER_FILES

_TINY_SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}


class TextTokenizer:
    """Conversion between text and token ids.

    Ids come from ``tokenizer.json`` unchanged; transformers reads the special tokens and the chat template.
    The class that ``tokenizer_config.json`` names is not used: transformers 5 rebuilds Llama's tokenizer,
    which DeepSeek's files name, and then splits text differently unless config.json is beside the file.
    """

    def __init__(self, files: Sequence[Path], special: PreTrainedTokenizerFast) -> None:
        self._tokenizer = Tokenizer.from_file(str(files[0]))
        self.decoder = TextDecoder(self._tokenizer)
        self._special = special
        # DeepSeek's tokenizer.json does not add this token, although tokenizer_config.json asks for it.
        adds_bos = special.init_kwargs.get("add_bos_token") and special.bos_token_id is not None
        self._begin = [int(special.bos_token_id)] if adds_bos else []
        data = b"".join(file.read_bytes() for file in files if file.is_file())
        self.digest = hashlib.sha256(data).hexdigest()[:16]  # of everything that determines ids

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._special.chat_template)

    @property
    def special_ids(self) -> dict[str, int | None]:
        """eos_token_id and pad_token_id; None where the tokenizer has none."""
        return {"eos_token_id": self._special.eos_token_id, "pad_token_id": self._special.pad_token_id}

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, after the BOS token if the model was trained with one."""
        ids = list(self._tokenizer.encode(text).ids)
        return ids if not self._begin or ids[:1] == self._begin else self._begin + ids

    def encode_chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Return the ids of messages (role, content) in the model's chat template, ready for a response.

        ``variables``: of the template, such as enable_thinking. Raises ValueError when the model has no
        template, or when the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError(
                "spec.model.path: the tokenizer has no chat template: give prompts as text, or put a "
                "chat_template.jinja into the model's directory"
            )
        try:
            text = self._special.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **variables
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"the chat template refuses these messages: {error}: correct them, or "
                "spec.data.chatTemplateKwargs"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of ids, with its special tokens, in threads of the library."""
        return list(self._tokenizer.decode_batch(list(rows), skip_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self.decoder.decode(ids)


def load_tokenizer(model_path: str) -> TextTokenizer:
    """Load the tokenizer of ``preset:...`` or of a Hugging Face directory.

    Raises ModelFilesError when the tokenizer is missing or cannot be read.
    """
    if model_path.startswith(PRESET):
        tiny = PreTrainedTokenizerFast(tokenizer_file=str(TINY_TOKENIZER), **_TINY_SPECIAL)
        return TextTokenizer([TINY_TOKENIZER], tiny)
    folder = Path(model_path)
    if not (folder / "tokenizer.json").is_file():
        raise ModelFilesError(folder, "there is no tokenizer.json")
    try:
        special = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return TextTokenizer([folder / name for name in TOKENIZER_FILES], special)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelFilesError(folder, f"the tokenizer cannot be read: {error}") from error
