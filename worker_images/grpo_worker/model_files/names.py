"""Names of files in a Hugging Face directory, and how they describe FP8; imports nothing that takes time."""

from pathlib import Path
from typing import Any

TINY_TOKENIZER = Path(__file__).parents[1] / "data" / "tiny_tokenizer.json"  # of the presets
INDEX = "model.safetensors.index.json"
# What transformers reads of a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
# As in the config.json of DeepSeek-V3: weights in FP8, with a scale for each block.
FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
