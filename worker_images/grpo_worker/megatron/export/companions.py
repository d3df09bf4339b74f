"""Files exported beside the weights: tokenizer, chat template, generation config, licence, code."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from grpo_worker.model_files.names import TINY_TOKENIZER

# Additional chat templates of a tokenizer; other folders hold weights in other formats, or pictures.
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
)
_TOKENS = ("bos", "eos", "pad")


def write_companions(folder: Path, hf: dict[str, Any], source: Path | None) -> None:
    """Copy the small files of the directory ``source``, or create those of a preset (None).

    Raises OSError that names the file.
    """
    if source is None:
        _write_of_preset(folder, hf)
        return
    for file in _companions(source):
        _copy(file, folder / file.relative_to(source))


def _companions(source: Path) -> Iterator[Path]:
    """Return all files except weights and their indices, hidden files, config.json and the model card.

    The exporter writes its own config.json, and the model card describes other weights.
    """
    for file in sorted(source.iterdir()):
        if file.name == _TEMPLATES and file.is_dir():
            yield from sorted(file.glob("*.jinja"))
        elif not file.is_dir() and not _is_excluded(file):
            yield file


def _is_excluded(file: Path) -> bool:
    name = file.name.lower()
    return (
        name == "config.json"
        or name.startswith((".", "readme"))
        or name.endswith(".index.json")
        or file.suffix.lower() in _WEIGHTS
    )


def _copy(file: Path, target: Path) -> None:
    try:
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    except OSError as error:
        raise OSError(
            f"{file} cannot be copied to {target} ({error.strerror or error}): check spec.model.path and the "
            "space of checkpoint.store"
        ) from error


def _write_of_preset(folder: Path, hf: dict[str, Any]) -> None:
    """Write the tiny tokenizer in a form that transformers loads, and the ids that end a response."""
    _copy(TINY_TOKENIZER, folder / "tokenizer.json")
    ids = {kind: hf[f"{kind}_token_id"] for kind in _TOKENS if hf.get(f"{kind}_token_id") is not None}
    tokenizer = Tokenizer.from_file(str(TINY_TOKENIZER))
    tokens = {f"{kind}_token": tokenizer.id_to_token(token) for kind, token in ids.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": hf["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "unk_token": "<unk>",
    }
    generation = {f"{kind}_token_id": token for kind, token in ids.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | tokens, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(generation | {"do_sample": True}, indent=1))
