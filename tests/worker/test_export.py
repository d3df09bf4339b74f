"""Export of a trained model: transformers and a second job load the files, also in FP8."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils.quantization_config import FineGrainedFP8Config

from grpo_worker.model_files.names import FP8_CONFIG, TINY_TOKENIZER
from support.ranks.launcher import run as run_on_ranks
from support.tiny_models import tiny_model

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "deepseek-tp2": ("deepseek_v3", {"tensor": 2, "expert_tensor": 2}),
    "deepseek-ep2": ("deepseek_v3", {"expert": 2}),
    "deepseek-pp2": ("deepseek_v3", {"pipeline": 2}),
    "qwen3-tp2": ("qwen3", {"tensor": 2, "expert_tensor": 2}),
    "qwen3-pp2": ("qwen3", {"pipeline": 2}),
    "qwen3-tied-tp2-pp2": ("qwen3-tied", {"tensor": 2, "pipeline": 2, "expert_tensor": 2}),
    "qwen3-moe-tp2-ep2": ("qwen3_moe", {"tensor": 2, "expert": 2}),
    "qwen3-moe-ep2": ("qwen3_moe", {"expert": 2}),
    "qwen3-moe-pp2": ("qwen3_moe", {"pipeline": 2}),
    "llama-tied-pp2": ("llama-tied", {"pipeline": 2}),
    "qwen2-tp2": ("qwen2", {"tensor": 2, "expert_tensor": 2}),
    "glm-tp2-ep2": ("glm4_moe", {"tensor": 2, "expert": 2}),
}


def world_of(layout: dict[str, int]) -> int:
    return layout.get("tensor", 1) * layout.get("pipeline", 1) if "pipeline" in layout else 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write the model directory of a job, without weights."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.6}))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_transformers_and_a_second_job_load_the_export(name: str, source: Path, tmp_path: Path) -> None:
    model, layout = LAYOUTS[name]
    found = run_on_ranks(
        "export_cases:round_trip",
        world_of(layout),
        root=str(tmp_path),
        model=model,
        layout=layout,
        source=str(source),
    )
    assert all(rank["reloaded"] for rank in found)
    differences = [rank["difference"] for rank in found if rank["difference"] is not None]
    assert differences and max(differences) <= 1e-5
    _is_whole(tmp_path / "first", tiny_model(model))
    _says_how_to_talk(tmp_path / "first")
    assert _contents(tmp_path / "first") == _contents(tmp_path / "second")


@pytest.mark.parametrize("taken", [False, True])
def test_config_names_the_mtp_layer_only_when_it_is_exported(taken: bool, tmp_path: Path) -> None:
    found = run_on_ranks(
        "export_cases:round_trip",
        2,
        root=str(tmp_path),
        model="deepseek_v3",
        layout={"pipeline": 2},
        source=None,
        mtp=taken,
    )
    assert all(rank["reloaded"] for rank in found)
    assert max(rank["difference"] for rank in found if rank["difference"] is not None) <= 1e-5
    config, layers = _json(tmp_path / "first" / "config.json"), tiny_model("deepseek_v3")["num_hidden_layers"]
    assert config["num_nextn_predict_layers"] == int(taken)
    names = _json(tmp_path / "first" / "model.safetensors.index.json")["weight_map"]
    assert any(name.startswith(f"model.layers.{layers}.") for name in names) == taken
    assert _contents(tmp_path / "first") == _contents(tmp_path / "second")


def test_a_preset_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    run_on_ranks("export_cases:in_bf16", 1, root=str(tmp_path / "hf"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    text = "what is 12 + 7?"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    generation = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 0)
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype is torch.bfloat16
    kept = {"e_score_correction_bias": torch.float32}  # as in DeepSeek-V3's own files
    for name, tensor in _tensors(tmp_path / "hf").items():
        assert tensor.dtype == kept.get(name.rsplit(".", 1)[-1], torch.bfloat16), name


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("deepseek_v3", {"tensor": 2, "expert_tensor": 2}),
        ("deepseek_v3", {"pipeline": 2}),
        ("qwen3", {"tensor": 2, "expert_tensor": 2}),
        ("qwen3_moe", {"tensor": 2, "expert": 2}),
        ("qwen2", {"tensor": 2, "expert_tensor": 2}),
        ("glm4_moe", {"tensor": 2, "expert": 2}),
    ],
)
def test_fp8_files_hold_the_blocks_of_whole_matrices(
    model: str, layout: dict[str, int], tmp_path: Path
) -> None:
    root = tmp_path / "hf"
    for counts in run_on_ranks("export_cases:in_fp8", 2, root=str(root), model=model, layout=layout):
        assert counts["otherwise"] == 0 and counts["quantised"] > 20 and counts["kept"] > 5
    index, tensors = _json(root / "model.safetensors.index.json"), _tensors(root)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = f"{name}_scale_inv"
            assert tensors[scale].dtype == torch.float32
            assert index["weight_map"][scale] == index["weight_map"][name]
    _is_quantised_for_engines(root, model, tensors)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_fails_when_one_cannot_write(rank: int, tmp_path: Path) -> None:
    target = tmp_path / "export" / "step-00000001"
    layout = {"tensor": 2, "expert": 2}
    for error in run_on_ranks("export_cases:with_a_full_disk", 2, root=str(target), layout=layout, rank=rank):
        assert error.startswith(f"checkpoint.store: {target} was not exported: rank {rank} cannot write")
        assert "1 of 2 ranks" in error
    _is_whole(target, tiny_model("deepseek_v3"))


def test_a_slow_store_is_not_reported_as_a_hang(tmp_path: Path) -> None:
    """Ranks wait for a writing rank outside collectives, whose timeout would end the gang."""
    layout = {"tensor": 2, "expert_tensor": 2}
    looks, _ = run_on_ranks("export_cases:on_a_slow_store", 2, root=str(tmp_path / "hf"), layout=layout)
    assert len(looks) > 3 and looks == [[]] * len(looks)


def test_an_export_to_a_stuck_store_delays_no_step_and_has_the_weights_of_its_step(tmp_path: Path) -> None:
    layout = {"tensor": 2, "expert": 2}
    calm = run_on_ranks("export_cases:steps_beside_nothing", 2, layout=layout)
    found = run_on_ranks("export_cases:beside_steps", 2, root=str(tmp_path), layout=layout)
    assert [rank["history"] for rank in found] == calm
    assert found[0]["early"] == (False, [tmp_path.name]), "it looks for what is left of earlier ones"
    assert not found[1]["early"][0]
    _is_whole(tmp_path / "step-00000001", tiny_model("deepseek_v3"))
    tensors = _tensors(tmp_path / "step-00000001")
    assert tensors.keys() == found[0]["weights"].keys()
    assert all(torch.equal(tensor, found[0]["weights"][name]) for name, tensor in tensors.items())
    assert any(not torch.equal(tensor, found[0]["after"][name]) for name, tensor in tensors.items())


def _is_whole(folder: Path, hf: dict[str, Any]) -> None:
    """Check what SGLang and vLLM need: the architecture, a dtype, and an index that matches the files."""
    config = _json(folder / "config.json")
    assert (config["architectures"], config["torch_dtype"]) == (hf["architectures"], "float32")
    assert "quantization_config" not in config and "dtype" not in config
    index = _json(folder / "model.safetensors.index.json")
    files: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            for name in handle.keys():  # noqa: SIM118
                assert files.setdefault(name, file.name) == file.name, f"{name} is in two files"
    assert index["weight_map"] == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in _tensors(folder).values())


def _says_how_to_talk(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi\n"
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.temperature) == ([2, 3], 0.6)


def _is_quantised_for_engines(root: Path, model: str, tensors: dict[str, torch.Tensor]) -> None:
    """Check that transformers and SGLang read the quantization: unlisted projections are FP8."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    config = _json(root / "config.json")["quantization_config"]
    assert FP8_CONFIG.items() <= config.items()
    assert FineGrainedFP8Config.from_dict(dict(config)).weight_block_size == [128, 128]
    engine = Fp8Config.from_config(config)
    assert engine.is_checkpoint_fp8_serialized and engine.weight_block_size == [128, 128]
    listed = {f"{name}.weight" for name in config.get("modules_to_not_convert", [])}
    routers = {name for name in tensors if name.endswith("mlp.gate.weight")}
    assert listed == (routers | {"lm_head.weight"} if model == "qwen3_moe" else set())
    assert all(tensors[name].dtype == torch.float32 for name in listed | routers)


def _json(file: Path) -> Any:
    return json.loads(file.read_text())


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return tensors
