"""Save the small files of every published model as transformers 4 writes them, into published/transformers-4.

pip install --no-deps --target FOLDER 'transformers==4.57.*' 'huggingface-hub<1' 'tokenizers==0.22.*'
PYTHONPATH=FOLDER python tests/support/published_models/save_with_transformers_4.py
"""

import shutil
import tempfile
from pathlib import Path

import transformers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from support.published_models import files as published_files

_CONFIG = ("config.json", "generation_config.json")
# vocab.json and merges.txt, which it also writes for Qwen3, repeat what tokenizer.json holds.
_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def save(model: str) -> None:
    """Save a model's configuration and tokenizer.

    A tokenizer.json that equals the published one, or that of a model saved before, is left out.
    """
    with tempfile.TemporaryDirectory() as temporary:
        small = published_files.write_small_files(model, Path(temporary) / "published")
        saved = Path(temporary) / "saved"
        AutoConfig.from_pretrained(small).save_pretrained(saved)
        GenerationConfig.from_pretrained(small).save_pretrained(saved)
        AutoTokenizer.from_pretrained(small).save_pretrained(saved)
        _keep(saved, _CONFIG, published_files.SAVED_BY_4 / "models" / model)
        tokenizer = published_files.TOKENIZERS[model]
        _keep(saved, _TOKENIZER, published_files.SAVED_BY_4 / "tokenizers" / tokenizer)
        present = published_files.tokenizer_json(model, "transformers-4")
        if published_files.read(saved / "tokenizer.json") != published_files.read(present):
            _keep(saved, ("tokenizer.json",), published_files.SAVED_BY_4 / "tokenizers" / tokenizer)


def _keep(saved: Path, names: tuple[str, ...], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (saved / name).is_file():
            shutil.copy(saved / name, folder)


def main() -> None:
    """Save every model. Raises SystemExit with another generation of transformers."""
    if not transformers.__version__.startswith("4."):
        raise SystemExit(f"transformers is {transformers.__version__}: put a 4.x first on PYTHONPATH")
    shutil.rmtree(published_files.SAVED_BY_4, ignore_errors=True)
    for model in published_files.MODELS:
        save(model)


if __name__ == "__main__":
    main()
