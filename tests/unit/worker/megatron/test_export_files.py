"""Files of an export: shards of limited size, config.json, and companion files."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_operator.api.catalog.architectures import architecture
from grpo_worker.checkpointing.exports import complete_exports
from grpo_worker.megatron.export import files as export_files
from grpo_worker.megatron.export.companions import write_companions
from grpo_worker.megatron.export.config import exported_config
from grpo_worker.megatron.export.files import FileWriter, index_of
from grpo_worker.megatron.export.owner import AttemptOwner
from grpo_worker.megatron.export.place import place_of
from grpo_worker.model_files.names import FP8_CONFIG, INDEX

# As in the directories of DeepSeek-V3 and Qwen3, and what else is found there.
ALONG = [
    "LICENSE", "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "merges.txt", "modeling_deepseek.py", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "vocab.json", "additional_chat_templates/tools.jinja",
]  # fmt: skip
LEFT = [
    "README.md", "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.Q4_K_M.gguf",
    "training_args.bin", ".gitattributes", ".cache/huggingface/x.json", "original/params.json",
]  # fmt: skip


def test_all_files_but_weights_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    for name in ALONG + LEFT:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"this is {name}")
    write_companions(target, {}, source)
    found = {str(f.relative_to(target)): f.read_text() for f in target.rglob("*") if f.is_file()}
    assert found == {name: f"this is {name}" for name in ALONG}


def test_a_dangling_symlink_is_named(tmp_path: Path) -> None:
    """As in a Hugging Face cache that was copied without its blobs."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").symlink_to("../blobs/0123")
    with pytest.raises(OSError, match=r"source/tokenizer\.json cannot be copied .*spec\.model\.path"):
        write_companions(tmp_path, {}, source)


def test_files_stay_below_the_limit_and_keep_scales_with_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_files, "FILE_BYTES", 1000)
    target = tmp_path / "export" / "step-00000001"
    place = place_of(target, AttemptOwner(2))
    place.begin(lambda folder: None)
    writer = FileWriter(place, 3, ThreadPoolExecutor(1), beside=False)
    added = [{f"{n}": torch.full((100,), n), f"{n}_scale_inv": torch.ones(10)} for n in range(5)]
    added.insert(2, {"large": torch.arange(500)})
    for tensors in added:
        writer.add(tensors)
    writer.flush()
    assert writer.report.failure is None
    assert not complete_exports(target.parent)
    place.complete({INDEX: index_of(writer.report.tensors)})
    assert complete_exports(target.parent) == {1}
    index = json.loads((target / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    files = {name: load_file(target / name) for name in names}
    assert sorted(f.name for f in target.glob("*.safetensors")) == names
    assert names[0] == "model-00003-00000.safetensors"
    assert all((target / name).stat().st_mode & 0o777 == 0o644 for name in names), "others may read it"
    sizes = [sum(t.nbytes for t in file.values()) for file in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(
        size <= 1000 or list(file) == ["large"] for size, file in zip(sizes, files.values(), strict=True)
    )
    for tensors in added:
        (name,) = {index["weight_map"][key] for key in tensors}
        assert all(torch.equal(files[name][key], value) for key, value in tensors.items())


def test_a_failed_writer_keeps_its_error_and_stops(tmp_path: Path) -> None:
    place = place_of(tmp_path / "export" / "step-00000001", AttemptOwner(0))
    writer = FileWriter(place, 1, ThreadPoolExecutor(1), beside=False)
    writer.add({"a": torch.ones(1)})
    writer.flush()
    assert writer.failed, "the place was not begun"
    place.begin(lambda folder: None)
    writer.add({"b": torch.ones(1)})
    writer.flush()
    assert str(writer.report.failure).startswith("cannot write") and writer.report.tensors == {}
    (building,) = (tmp_path / "export").iterdir()
    assert list(building.iterdir()) == []


def test_config_json_describes_the_files() -> None:
    hf = architecture("deepseek-v3") | {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}
    names = ["model.embed_tokens.weight", "model.layers.3.mlp.gate.weight"]
    plain = exported_config(hf, names, "float32", "none")
    assert plain == architecture("deepseek-v3") | {"torch_dtype": "float32", "num_nextn_predict_layers": 0}
    names.append("model.layers.61.eh_proj.weight")
    quantised = exported_config(hf, names, "bfloat16", "fp8-block128")
    assert quantised["num_nextn_predict_layers"] == 1
    assert quantised["quantization_config"] == FP8_CONFIG, "as published"


def test_routers_of_qwen3_are_listed_as_not_quantised() -> None:
    """Engines would otherwise look for their scales."""
    dense = exported_config(architecture("qwen3-8b"), ["lm_head.weight"], "bfloat16", "fp8-block128")
    assert dense["quantization_config"] == FP8_CONFIG
    names = [
        f"model.layers.{n}.mlp.{part}.weight" for n in range(2) for part in ("gate", "experts.0.up_proj")
    ]
    moe = exported_config(architecture("qwen3-30b-a3b"), names, "bfloat16", "fp8-block128")
    listed = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert moe["quantization_config"] == FP8_CONFIG | {"modules_to_not_convert": listed}
    assert "num_nextn_predict_layers" not in moe
