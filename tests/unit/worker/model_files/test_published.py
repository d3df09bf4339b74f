"""The small forms of the published models: transformers loads them, and they differ only in size."""

# ruff: noqa: RUF001 - DeepSeek's special tokens have full-width bars

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_operator.api.catalog.architectures import architecture
from support.published_models import directory as published
from support.published_models import files as published_files

TEXT = "Sum of 1 + 22:\n\n  it's  3333, nicht wahr? für alle 你好 😀\n\tif (x <= 7):\r\n"
# What the whole published tokenizers make of these texts, which needs only merges that were kept.
TOKENS = {
    "qwen3": {
        "<|im_start|>user\nit's 12 + 5, all for you?<|im_end|>\n<think>\n\n</think>\n\n": (
            "<|im_start|> user Ċ it 's Ġ 1 2 Ġ+ Ġ 5 , Ġall Ġfor Ġyou ? <|im_end|> Ċ <think> ĊĊ </think> ĊĊ"
        ),
        " 1 + 5 = 6\n\n": "Ġ 1 Ġ+ Ġ 5 Ġ= Ġ 6 ĊĊ",
    },
    "deepseek_v3": {
        "<｜begin▁of▁sentence｜><｜User｜>it's 12 + 5, all for you?<｜Assistant｜>\n": (
            "<｜begin▁of▁sentence｜> <｜User｜> it 's Ġ 12 Ġ+ Ġ 5 , Ġall Ġfor Ġyou ? <｜Assistant｜> Ċ"
        ),
        " 1 + 5 = 6\n\n": "Ġ 1 Ġ+ Ġ 5 Ġ= Ġ 6 ĊĊ",
    },
}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
    {"role": "user", "content": "and 2 + 2?"},
]
GENERATION_PROMPT = {
    "DeepSeek-R1": "<｜Assistant｜><think>\n",
    "deepseek_v3": "<｜Assistant｜>",
    "qwen3": "<|im_start|>assistant\n",
}
CASES = [(model, generation) for model in published.MODELS for generation in published.GENERATIONS]
every_directory = pytest.mark.parametrize(("model", "generation"), CASES)
every_model = pytest.mark.parametrize("model", published.MODELS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return directories by model and generation, each written once."""
    root = tmp_path_factory.mktemp("published")
    return functools.cache(
        lambda model, generation: published.write(model, generation, root / model / generation)
    )


def _family(model: str) -> str:
    return "qwen3" if model.startswith("Qwen3") else "deepseek_v3"


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _ends(model: str) -> list[str]:
    """Return the tokens that end generation according to the published generation_config.json."""
    if _family(model) == "deepseek_v3":
        return ["<｜end▁of▁sentence｜>"]
    return ["<|endoftext|>"] if model.endswith("-Base") else ["<|im_end|>", "<|endoftext|>"]


def _names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as handle:
        return set(handle.keys())


@every_directory
def test_transformers_loads_every_weight(directory: Any, model: str, generation: str) -> None:
    folder = directory(model, generation)
    causal, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["mismatched_keys"]
    # transformers has no multi-token prediction; only the models' authors have stored it.
    extra = found["unexpected_keys"]
    assert all(name.startswith("model.layers.4.") for name in extra)
    assert bool(extra) == (generation == "published" and _family(model) == "deepseek_v3")
    logits = causal(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, published_files.config(model)["vocab_size"]) and logits.isfinite().all()
    assert logits.std() > 0


@every_directory
def test_weights_have_the_published_names(directory: Any, model: str, generation: str) -> None:
    names = _names(directory(model, generation))
    experts = {name for name in names if ".mlp.experts." in name}
    assert bool(experts) == ("num_experts_per_tok" in published_files.config(model))
    endings = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    assert all(name.endswith(endings) and name.split(".")[5].isdigit() for name in experts)
    assert {name for name in names if not name.startswith("model.layers.4.")} == {
        name for name in _names(directory(model, "published")) if not name.startswith("model.layers.4.")
    }


@every_directory
def test_only_the_published_files_hold_multi_token_prediction(
    directory: Any, model: str, generation: str
) -> None:
    folder = directory(model, generation)
    last = {name.removeprefix("model.layers.4.") for name in _names(folder) if ".layers.4." in name}
    if generation != "published" or _family(model) == "qwen3":
        assert not last
        return
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= last
    with safe_open(folder / "model.safetensors", "pt") as handle:
        for repeated, own in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            stored = handle.get_tensor(f"model.layers.4.{repeated}.weight")
            assert stored.equal(handle.get_tensor(f"{own}.weight"))


@every_directory
def test_special_tokens_agree_between_the_files(directory: Any, model: str, generation: str) -> None:
    folder = directory(model, generation)
    text = _tokenizer(folder).id_to_token
    config, end = AutoConfig.from_pretrained(folder), _ends(model)
    ids = GenerationConfig.from_pretrained(folder).eos_token_id
    assert [text(token) for token in (ids if isinstance(ids, list) else [ids])] == end
    assert text(config.eos_token_id) == end[0]
    assert config.pad_token_id is None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == text(tokenizer.eos_token_id) == end[0]
    assert tokenizer.pad_token == text(tokenizer.pad_token_id) == end[-1]
    begin = "<｜begin▁of▁sentence｜>" if _family(model) == "deepseek_v3" else None
    assert tokenizer.bos_token == begin
    assert text(config.bos_token_id) == (begin or "<|endoftext|>")
    assert len(tokenizer) <= config.vocab_size


@every_directory
def test_text_is_split_like_by_the_published_tokenizer(directory: Any, model: str, generation: str) -> None:
    tokenizer = _tokenizer(directory(model, generation))
    for text, tokens in TOKENS[_family(model)].items():
        assert tokenizer.encode(text, add_special_tokens=False).tokens == tokens.split(" ")
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT


@every_directory
def test_transformers_gives_the_ids_of_the_file(directory: Any, model: str, generation: str) -> None:
    folder = directory(model, generation)
    ours, theirs = _tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for special in (True, False):
        ids = ours.encode(TEXT, add_special_tokens=special).ids
        assert theirs.encode(TEXT, add_special_tokens=special) == ids
    # transformers 4 writes what add_bos_token asks for into tokenizer.json; the published file does without.
    begins = ours.encode(TEXT).tokens[0] == "<｜begin▁of▁sentence｜>"
    assert begins == (generation == "transformers-4" and _family(model) == "deepseek_v3")


@every_directory
def test_the_template_renders_as_published(directory: Any, model: str, generation: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory(model, generation))
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        published.template_of(model)
    )
    for messages, thinking in ((TURNS, True), (TURNS[1:2], False)):
        variables = {"add_generation_prompt": True, "enable_thinking": thinking}
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        begin = tokenizer.bos_token or ""
        assert rendered == template.render(messages=messages, bos_token=begin, **variables)
        assert "1 + 1?" in rendered
    last = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    # DeepSeek-V3, which does not think, leaves earlier thoughts where they are.
    assert ("easy" in last) == model.startswith("DeepSeek-V3")
    assert last.endswith(GENERATION_PROMPT.get(model, GENERATION_PROMPT[_family(model)]))


@every_model
def test_only_sizes_are_smaller(model: str) -> None:
    published_one, small = published_files.as_published(model, "config.json"), published_files.config(model)
    sizes = {*published_files.SIZES[model], "vocab_size"}
    assert all(small[name] < published_one[name] for name in sizes)
    differing = {name for name in published_one if small.get(name) != published_one[name]}
    tokens = {"bos_token_id", "eos_token_id"} if _family(model) == "qwen3" else {"quantization_config"}
    assert differing == sizes | tokens
    assert set(small) <= set(published_one)


@pytest.mark.parametrize(
    ("model", "name"),
    [("DeepSeek-V3", "deepseek-v3"), ("Qwen3-8B", "qwen3-8b"), ("Qwen3-30B-A3B", "qwen3-30b-a3b")],
)
def test_known_architectures_have_the_published_figures(model: str, name: str) -> None:
    ours, theirs = architecture(name), published_files.as_published(model, "config.json")
    scaling = (ours.pop("rope_scaling") or {}, theirs.pop("rope_scaling") or {})
    assert scaling[1].items() <= scaling[0].items()
    assert {field: theirs.get(field) for field in ours} == ours


def test_the_weights_depend_on_the_seed(tmp_path: Path) -> None:
    for generation in published.GENERATIONS:
        files = [
            published.write("Qwen3-8B", generation, tmp_path / generation / name, seed) / "model.safetensors"
            for name, seed in (("one", 1), ("same", 1), ("other", 2))
        ]
        one, same, other = (file.read_bytes() for file in files)
        assert one == same != other


@pytest.mark.parametrize("generation", published.GENERATIONS)
def test_weights_have_the_requested_dtype(tmp_path: Path, generation: str) -> None:
    folder = published.write("DeepSeek-R1", generation, tmp_path, dtype=torch.bfloat16)
    with safe_open(folder / "model.safetensors", "pt") as handle:
        assert handle.get_tensor("lm_head.weight").dtype == torch.bfloat16


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model='Qwen3-7B': use one of DeepSeek-V3, "):
        published.write("Qwen3-7B", "published", tmp_path)
    with pytest.raises(ValueError, match="generation='transformers-3': use one of published, "):
        published.write("Qwen3-8B", "transformers-3", tmp_path)
