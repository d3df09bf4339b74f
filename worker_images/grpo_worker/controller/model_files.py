"""Model files that the controller reads once, at the start of a job."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_operator.api.catalog.presets import PRESET
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.model_files.config import model_config, read_json
from grpo_worker.model_files.directory import check_directory
from grpo_worker.model_files.errors import ModelFilesError
from grpo_worker.model_files.special_tokens import SpecialTokens, special_tokens


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Everything but the weights of a model. ``config``: config.json in its published form."""

    config: dict[str, Any]
    tokenizer: TextTokenizer
    tokens: SpecialTokens


def open_model(path: str, stop_token_ids: Iterable[int] = ()) -> ModelFiles:
    """Read everything but the weights of ``preset:NAME`` or of a Hugging Face directory.

    ``stop_token_ids``: tokens that end a response, in addition to the model's own. Raises ModelFilesError
    that names the missing file or field.
    """
    preset = path.startswith(PRESET)
    folder = Path(path)
    config = model_config(path) if preset else check_directory(folder)
    tokenizer = load_tokenizer(path)
    generation: dict[str, Any] = {}
    if not preset and (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
    try:
        family_of(config).check(config)
        tokens = special_tokens(config, generation, tokenizer.special_ids, stop_token_ids)
    except (ValueError, TypeError) as error:
        raise ModelFilesError(folder, str(error)) from error
    return ModelFiles(config, tokenizer, tokens)
