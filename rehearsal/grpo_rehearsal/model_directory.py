"""Directory that stands for the model's files: the real config.json, a made-up tokenizer, no weights."""

import json
import struct
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.model_files.names import TINY_TOKENIZER

_SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}
_END, _PAD, _BEGIN = "eos_token_id", "pad_token_id", "bos_token_id"


def write_model(spec: GRPOJobSpec, folder: Path) -> dict[str, Any]:
    """Write the directory and return its config.json. Raises ValueError for an unknown architecture."""
    config = spec.model.config()
    if config is None:
        raise ValueError("spec.model: the operator does not know the model: set spec.model.architecture")
    tokenizer = json.loads(Path(TINY_TOKENIZER).read_text())
    vocabulary = tokenizer["model"]["vocab"]
    # As many ids as the real tokenizer has, because their digits and their memory are rehearsed too.
    vocabulary |= {f" word{number}": number for number in range(len(vocabulary), config["vocab_size"])}
    ids = {_END: vocabulary["<eos>"], _PAD: vocabulary["<pad>"], _BEGIN: vocabulary["<bos>"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | ids))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return config | ids
