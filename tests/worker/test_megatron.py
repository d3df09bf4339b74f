"""Megatron-Core on gloo ranks: steps, checkpoints, the CPU platform."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import FP32, stage_memory
from support.ranks.launcher import run as run_on_ranks

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}


def test_training_steps_agree_between_layouts() -> None:
    one = run_on_ranks("policy_cases:steps", 1, layout={}, count=3)[0]
    for rank in run_on_ranks("policy_cases:steps", 2, layout=TP2_EP2, count=3):
        for mine, reference in zip(rank, one, strict=True):
            for name, value in reference.items():
                assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_recomputing_activations_changes_no_step() -> None:
    kept = run_on_ranks("policy_cases:steps", 2, layout=TP2_EP2, count=2)
    assert run_on_ranks("policy_cases:steps", 2, layout=TP2_EP2, count=2, recompute="full") == kept


@pytest.mark.parametrize("layout", [TP2_EP2, {"pipeline": 2, "layers_in_first_stage": 1}], ids=str)
def test_offloading_is_bitwise_and_leaves_nothing_on_the_device(
    layout: dict[str, int], tmp_path: Path
) -> None:
    plain = run_on_ranks("policy_cases:steps_and_weights", 2, layout=layout, count=3)
    away = run_on_ranks("policy_cases:steps_offloaded", 2, root=str(tmp_path), layout=layout, count=2)
    for found, expected in zip(away, plain, strict=True):
        assert found["history"] == expected["history"] and found["held"] == [0, 0, 0]
        assert found["again"] == [expected["history"][2:]] * 2, "from a checkpoint, and from a snapshot"
        assert all(torch.equal(found["weights"][name], t) for name, t in expected["weights"].items())


@pytest.mark.parametrize("layout", [TP2_EP2, {"pipeline": 2, "layers_in_first_stage": 1}, {}], ids=str)
def test_a_checkpoint_from_host_memory_needs_no_device_and_is_bitwise(
    layout: dict[str, int], tmp_path: Path
) -> None:
    plain = run_on_ranks("policy_cases:steps_and_weights", 2, layout=layout, count=3)
    saved = run_on_ranks("policy_cases:steps_saved_from_host", 2, root=str(tmp_path), layout=layout, count=2)
    for found, expected in zip(saved, plain, strict=True):
        assert (found["moved"], found["resident"]) == (0, 0)
        assert found["history"] == expected["history"], "the steps beside the checkpoint"
        assert found["again"] == expected["history"][2:], "the step after a restore"
        assert all(torch.equal(found["weights"][name], t) for name, t in expected["weights"].items())


def test_resume_from_an_asynchronous_checkpoint_is_bitwise(tmp_path: Path) -> None:
    for rank in run_on_ranks("policy_cases:save_and_resume", 2, root=str(tmp_path), layout=TP2_EP2):
        assert rank["resumed"] == rank["undisturbed"]
        assert rank["weights_equal"]
    assert (tmp_path / "step-00000001" / "COMMITTED").is_file()


@pytest.mark.fault(
    row="21",
    point="the store takes no write for three steps",
    witness="no checkpoint is complete meanwhile",
    compared="steps of ranks without checkpoints, and the steps after a restore, bitwise",
    partial="no bound on the delay of a step",
)
def test_a_stuck_store_delays_checkpoints_and_no_step(tmp_path: Path) -> None:
    calm = run_on_ranks("policy_cases:steps", 2, layout=TP2_EP2, count=3)
    found = run_on_ranks("policy_cases:save_on_a_stuck_store", 2, root=str(tmp_path), layout=TP2_EP2)
    for rank, expected in zip(found, calm, strict=True):
        assert rank["history"] == expected and rank["resumed"] == expected[1:]
        assert rank["polled"] == [[], [], []] and rank["complete"] == [2, 3], "the oldest is removed"
    first, second = found
    assert first["created"] == ["step-00000003"] and ".metadata" in first["marked"]
    assert (first["finished"], second["finished"]) == ([3], [])
    assert json.loads((tmp_path / "step-00000003" / "controller.json").read_text()) == {"cursor": 16}
    assert not list(tmp_path.glob("step-*/.*.tmp"))


@pytest.mark.parametrize("layout", [TP2_EP2, {"pipeline": 2, "layers_in_first_stage": 1}, {}], ids=str)
def test_ranks_write_the_bytes_that_the_planner_expects(layout: dict[str, int], tmp_path: Path) -> None:
    run_on_ranks("policy_cases:save", 2, root=str(tmp_path), layout=layout)
    written = _written_values(tmp_path / "step-00000001")
    model, shape = ModelShape.from_hf(architecture("tiny-moe")), Layout(world=2, **layout)
    planned = max(stage.saved for stage in stage_memory(model, shape, Workload(1, 32), precision=FP32))
    count, biases = parameters.total(model).total, 2 * 8  # the planner leaves the routers' biases out
    assert 0 <= sum(written.values()) - 16 * count <= 4 * biases, "each value once"
    largest = model.vocabulary * model.hidden
    assert abs(max(written.values()) - planned) <= 12 * largest + 4 * biases, "but for one parameter"


def _written_values(checkpoint: Path) -> Counter[str]:
    """Return the bytes of tensors in a checkpoint by the rank that wrote them."""
    found: Counter[str] = Counter()
    metadata = FileSystemReader(checkpoint).read_metadata()
    for index, place in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        if isinstance(tensor, TensorStorageMetadata):
            chunk = next(c for c in tensor.chunks if index.offset is None or c.offsets == index.offset)
            found[place.relative_path.split("_")[2]] += chunk.sizes.numel() * tensor.properties.dtype.itemsize
    return found


@pytest.mark.parametrize("layout", [TP2_EP2, {"pipeline": 2, "layers_in_first_stage": 1}, {"context": 2}])
def test_resume_from_a_snapshot_is_bitwise(layout: dict[str, int], tmp_path: Path) -> None:
    for rank in run_on_ranks("policy_cases:snapshot_and_resume", 2, root=str(tmp_path), layout=layout):
        assert rank["resumed"] == rank["undisturbed"]
        assert rank["weights_equal"] and not rank["mapped"]


@pytest.mark.parametrize("layout", [TP2_EP2, {"pipeline": 2, "layers_in_first_stage": 1}, {"context": 2}])
def test_parameter_count_and_router_metrics_cover_all_ranks(layout: dict[str, int]) -> None:
    ((active, expected),) = run_on_ranks("policy_cases:figures", 1, layout={})
    assert active == _active(architecture("tiny-moe"))
    for found, routers in run_on_ranks("policy_cases:figures", 2, layout=layout):
        assert found == active
        assert routers == pytest.approx(expected, rel=1e-4)
    assert {name: value for name, value in expected.items() if "dropped" in name} == pytest.approx(
        {f"moe/dropped_tokens/layer_{layer}": 0.0 for layer in (1, 2)}
    )
    assert all(1 <= value < 4 for name, value in expected.items() if "aux_loss" in name)


def _active(hf: dict[str, Any]) -> int:
    """Return the planner's count: all parameters but the embedding, and only the chosen experts."""
    model = ModelShape.from_hf(hf)
    whole = parameters.total(model)
    chosen = whole.expert * hf["num_experts_per_tok"] // hf["n_routed_experts"]
    biases = hf["n_routed_experts"] * (hf["num_hidden_layers"] - hf["first_k_dense_replace"])
    active: int = whole.split + whole.whole + chosen - parameters.embedding(model).total + biases
    return active


TP2 = (2, {"tensor": 2, "expert_tensor": 2})
EP2 = (2, {"expert": 2})
PP2 = (2, {"pipeline": 2, "layers_in_first_stage": 1})
# The first stage holds the dense layer alone: no expert, and nothing for their optimizer.
EP2_PP2 = (4, {"expert": 2} | PP2[1])
RESHARD = {
    "ep2-to-one": (EP2, (1, {})),
    "ep2-to-tp2": (EP2, TP2),
    "one-to-pp2": ((1, {}), PP2),
    "tp2-to-ep2-pp2": (TP2, EP2_PP2),
    "ep2-pp2-to-ep2": (EP2_PP2, EP2),
    "ep2-pp2-again": (EP2_PP2, EP2_PP2),
}


@pytest.mark.parametrize("name", RESHARD)
def test_a_checkpoint_resumes_in_another_layout_with_equal_losses(name: str, tmp_path: Path) -> None:
    (before, saved), (after, loaded) = RESHARD[name]
    expected = run_on_ranks("policy_cases:save", before, root=str(tmp_path), layout=saved)[0]
    for rank in run_on_ranks("policy_cases:resume", after, root=str(tmp_path), layout=loaded):
        for mine, reference in zip(rank, expected, strict=True):
            for metric, value in reference.items():
                assert mine[metric] == pytest.approx(value, rel=2e-5, abs=1e-6), metric


@pytest.mark.fault(
    row="22",
    point="a bit of a checkpoint's tensor changes",
    witness="all ranks name file and bytes",
    bound="at the load",
    partial="detection only",
)
@pytest.mark.parametrize("fqn", ["output_layer.weight", "optimizer.state.exp_avg.output_layer.weight"])
def test_a_changed_bit_is_found_on_all_ranks(fqn: str, tmp_path: Path) -> None:
    for message in run_on_ranks("policy_cases:load_damaged", 2, root=str(tmp_path), layout={}, fqn=fqn):
        assert (
            ".distcp was changed after the save, between bytes" in message and "older checkpoint" in message
        )


def test_every_cpu_fix_still_finds_its_module() -> None:
    """An upgrade of megatron-core that moves a module would silently drop its fix."""
    code = (
        "from grpo_worker.megatron.cpu import platform as cpu_platform, patches; cpu_platform.install();"
        "import grpo_worker.megatron.checkpoint.checkpointer;"
        "assert patches.APPLIED == set(patches.FIXES), set(patches.FIXES) - patches.APPLIED;"
        "assert cpu_platform.Rewrite.hits > 100"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_import_hook_refuses_a_late_installation() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core');"
        "from grpo_worker.megatron.cpu import platform as cpu_platform; cpu_platform.install()"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "must run before megatron.core is imported" in done.stderr


@pytest.mark.parametrize("loaded", [{}, TP2_EP2], ids=str)
def test_chunks_of_the_optimizer_state_load_in_another_layout(loaded: dict[str, int], tmp_path: Path) -> None:
    """The third checkpoint is one whose plan comes from the ones before."""
    ranks = run_on_ranks("policy_cases:save", 2, root=str(tmp_path), layout={}, chunk=1000, saves=3)
    metadata = FileSystemReader(tmp_path / "step-00000003").read_metadata()
    embedding = metadata.state_dict_metadata["optimizer.state.exp_avg.embedding.word_embeddings.weight"]
    assert isinstance(embedding, TensorStorageMetadata) and len(embedding.chunks) > 10
    files = {
        place.relative_path.split("_")[2]
        for key, place in metadata.storage_data.items()
        if "exp_avg." in key.fqn
    }
    assert files == {"0", "1"}, "both ranks save"
    for rank in run_on_ranks("policy_cases:resume", 2, root=str(tmp_path), layout=loaded, step=3):
        for mine, expected in zip(rank, ranks[0], strict=True):
            assert mine["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-5, abs=1e-6)
            if not loaded:
                assert mine == expected
