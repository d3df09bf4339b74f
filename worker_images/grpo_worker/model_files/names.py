"""Names of files in a Hugging Face directory, and its FP8 config; imports no third-party library."""

from pathlib import Path
from typing import Any

TINY_TOKENIZER = Path(__file__).parents[1] / "data" / "tiny_tokenizer.json"  # of the presets
INDEX = "model.safetensors.index.json"
# Files of a tokenizer that transformers reads.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
# As in DeepSeek-V3's config.json: FP8 weights with one scale per block.
FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
