"""A model's directory is read as it is, whichever generation of transformers has written it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_operator.api.catalog.architectures import architecture
from grpo_worker.controller.model_files import open_model
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.model_files.config import canonical, model_config
from grpo_worker.model_files.directory import check_directory
from grpo_worker.model_files.errors import ModelFilesError
from grpo_worker.model_files.names import TINY_TOKENIZER
from grpo_worker.model_files.special_tokens import special_tokens

TINY: dict[str, Any] = architecture("tiny-moe")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole directory; its weights are of no model."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    save_file({"a": torch.zeros(8, 8), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_names_of_transformers_5_become_those_of_published_files() -> None:
    newer = {
        "model_type": "qwen3_moe",
        "num_local_experts": 8,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "dtype": "bfloat16",
        "id2label": {"0": "LABEL_0"},
    }
    assert canonical(newer) == {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def test_what_sglang_reads_and_transformers_5_drops_is_completed() -> None:
    config = {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_local_experts": 8, "head_dim": 64}
    config["rope_parameters"] = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40.0}
    found = canonical(config)
    assert (found["moe_layer_freq"], found["topk_method"], found["scoring_func"]) == (
        1,
        "noaux_tc",
        "sigmoid",
    )
    assert "num_experts" not in found and "head_dim" not in found
    assert found["rope_scaling"]["type"] == found["rope_scaling"]["rope_type"] == "yarn"


def test_published_files_stay_as_they_are() -> None:
    published = dict(TINY)
    assert canonical(published | {"quantization_config": {}, "auto_map": {}}) == published
    assert model_config("preset:tiny-moe") == published
    with pytest.raises(ValueError, match="unknown preset 'preset:huge': use preset:tiny-moe, "):
        model_config("preset:huge")


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "more", "end", "pad"),
    [
        ({"eos_token_id": 45}, {"eos_token_id": [45, 43]}, {"eos_token_id": 45, "pad_token_id": 43}, (),
         (45, 43), 43),
        ({"eos_token_id": 1}, {}, {"eos_token_id": 1, "pad_token_id": None}, (), (1,), 1),
        ({"eos_token_id": None, "pad_token_id": None}, {}, {"eos_token_id": 7}, (9,), (7, 9), 7),
        ({}, {"pad_token_id": 3}, {}, (9,), (9,), 3),
        ({"eos_token_id": [2, 4], "pad_token_id": -1}, {"pad_token_id": 100}, {}, (4,), (2, 4), 2),
    ],
    ids=["instruct", "deepseek", "null-config", "given-by-the-job", "list"],
)  # fmt: skip
def test_end_and_pad_tokens_follow_a_rule(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any], more: tuple[int, ...],
    end: tuple[int, ...], pad: int,
) -> None:  # fmt: skip
    found = special_tokens(config | {"vocab_size": 100}, generation, tokenizer, more)
    assert (found.end, found.pad) == (end, pad)


def test_a_model_without_an_end_and_tokens_outside_of_it_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no token that ends a response .* set algorithm\.stopTokenIds"):
        special_tokens({"vocab_size": 100, "eos_token_id": None}, {}, {"eos_token_id": None})
    with pytest.raises(ValueError, match="eos_token_id=100 is outside of the vocabulary of 100 tokens"):
        special_tokens({"vocab_size": 100, "eos_token_id": 100}, {}, {})


def test_a_whole_directory_opens(folder: Path) -> None:
    found = open_model(str(folder), (5,))
    assert found.config == TINY and found.tokens.end == (2, 5) and found.tokens.pad == 0
    ids = found.tokenizer.encode("what is 12 + 7?")
    assert found.tokenizer.decode(ids) == "what is 12 + 7?" and not found.tokenizer.has_chat_template


def test_the_preset_has_special_tokens() -> None:
    found = open_model("preset:tiny-moe")
    assert (found.tokens.end, found.tokens.pad) == ((2,), 0)


def _index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    text = json.dumps({"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(text)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _lack(folder: Path, field: str) -> None:
    (folder / "config.json").write_text(json.dumps({k: v for k, v in TINY.items() if k != field}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json contains no JSON object"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "there is no tokenizer.json: load"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "the tokenizer cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there are no safetensors files"),
        (_index, "model-2.safetensors is missing"),
        (_cut, r"model.safetensors has \d+ bytes of \d+: copy it again"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 40), "is not a safetensors file"),
        (lambda folder: _lack(folder, "n_routed_experts"), "config.json lacks n_routed_experts"),
        (lambda folder: _lack(folder, "model_type"), "model_type None is not supported: use one of deepseek"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(ModelFilesError, match=rf"^spec\.model\.path={folder}: .*{message}"):
        open_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_the_pods_user_may_not_read_is_no_damaged_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened = Path.open

    def refuse(
        file: Path, *arguments: Any, **more: Any
    ) -> Any:  # root, who may run the tests, is refused nothing
        if file.name == name:
            raise PermissionError(13, "Permission denied")
        return opened(file, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        ModelFilesError, match=rf"{name} cannot be read by uid \d+: .*securityContext.runAsUser"
    ):
        check_directory(folder)


def test_a_directory_that_is_not_there_names_the_mount(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="there is no such directory: nothing is mounted there"):
        check_directory(tmp_path / "nothing")
    with pytest.raises(ModelFilesError, match="the directory is empty"):
        check_directory(tmp_path)


def test_the_digest_of_a_tokenizer_covers_its_template(folder: Path) -> None:
    before = load_tokenizer(str(folder)).digest
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}:")
    chatty = load_tokenizer(str(folder))
    assert chatty.has_chat_template and chatty.digest != before
    assert chatty.encode_chat([{"role": "user", "content": "12"}]) == chatty.encode("12:")
