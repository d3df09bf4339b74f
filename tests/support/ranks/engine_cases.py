"""Engines built by SGLang itself, on the first rank and without peers.

torch's "fake" backend stands for the other ranks, so that engines of 64 GPUs fit in one process; the weights
are on the meta device, and few layers stand for all. Run as a process of its own: SGLang's configuration is
global.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.plugins import load_plugins
from torch.testing._internal.distributed.fake_pg import FakeStore

load_plugins()

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.distributed.device_communicators import pynccl  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers import deep_gemm_wrapper  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.layers.moe import utils as moe  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe  # noqa: E402
from sglang.srt.model_loader import loader  # noqa: E402
from sglang.srt.model_loader.utils import set_default_torch_dtype  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative import draft_parallel  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from sglang.srt.speculative.spec_utils import draft_tp_context  # noqa: E402

from grpo_operator.plan.planner.engines.memory import engine_weights  # noqa: E402
from grpo_operator.plan.planner.engines.shape import EngineShape, problems  # noqa: E402
from grpo_operator.plan.planner.model.shape import ModelShape  # noqa: E402

FP8 = {
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    }
}  # fmt: skip
# Files whose errors are refusals of an engine's shape.
CHECKS = "/sglang/srt/"


def compare(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what planner and SGLang make of each case: bytes of weights on the first GPU, or a refusal.

    A case has the model's config.json (``hf``) and the fields of EngineShape (``shape``).
    """
    return [
        {"planner": planned(case["hf"], case["shape"]), "sglang": built(case["hf"], case["shape"])}
        for case in cases
    ]


def planned(hf: dict[str, Any], shape: dict[str, Any]) -> int | str:
    model, engine = ModelShape.from_hf(hf), EngineShape(**shape)
    refusals = problems(model, engine)
    return "; ".join(refusals) if refusals else engine_weights(model, engine).total


def built(hf: dict[str, Any], shape: dict[str, Any]) -> int | str:
    """Return the bytes of SGLang's parameters on the first GPU, or its refusal."""
    engine = EngineShape(**shape)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            process_groups(server_arguments(folder, hf, engine)) as arguments,
        ):
            models = build(arguments, torch.device("meta"))
            parameters = {parameter for model in models for parameter in model.parameters()}
            return sum(int(p.numel() * p.element_size()) for p in parameters)
    except (AssertionError, ValueError) as error:
        if CHECKS not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
        return f"{type(error).__name__}: {error}"


def build(arguments: ServerArgs, device: torch.device) -> list[Any]:
    """Return the engine's model and, if it drafts, the model that drafts, which has the same two ends."""
    served = _model(ModelConfig.from_server_args(arguments), device)
    if arguments.speculative_algorithm is None:
        return [served]
    config = ModelConfig.from_server_args(arguments, is_draft_model=True)
    algorithm = SpeculativeAlgorithm.from_string("EAGLE")  # as SGLang calls NEXTN
    spec = draft_parallel.model_draft_parallel_spec(config, spec_algorithm=algorithm)
    with (
        draft_tp_context(draft_parallel.resolve_draft_parallel_layout(spec)),
        moe.speculative_moe_backend_context(),
        moe.speculative_moe_a2a_backend_context(),
        moe.draft_model_build_scope(),
    ):
        draft = _model(config, device)
    with patch.object(torch.cuda, "synchronize"):  # SGLang's method synchronizes with a GPU
        draft.set_embed_and_head(served.model.embed_tokens.weight, served.lm_head.weight)
    return [served, draft]


def _model(config: ModelConfig, device: torch.device) -> Any:
    load = loader.LoadConfig(load_format="dummy")
    with device, set_default_torch_dtype(torch.bfloat16):
        return loader._initialize_model(config, load, loader._get_quantization_config(config, load))


def server_arguments(folder: str, hf: dict[str, Any], engine: EngineShape) -> ServerArgs:
    (Path(folder) / "config.json").write_text(json.dumps(hf | (FP8 if engine.fp8 else {})))
    fields: dict[str, Any] = {
        "model_path": folder, "device": "cpu", "dtype": "bfloat16", "load_format": "dummy",
        "skip_tokenizer_init": True, "attention_backend": "torch_native", "sampling_backend": "pytorch",
        "grammar_backend": "none", "disable_overlap_schedule": True,
        "context_length": min(4096, hf["max_position_embeddings"]),
        "tp_size": engine.tensor, "ep_size": engine.expert, "nnodes": max(engine.tensor // 8, 1),
        "dist_init_addr": "127.0.0.1:1",
    }  # fmt: skip
    if engine.attention_data > 1:
        fields |= {"dp_size": engine.attention_data, "enable_dp_attention": True, "moe_dense_tp_size": 1}
    if engine.all_to_all:
        fields["moe_a2a_backend"] = "deepep"
    if engine.dp_lm_head:
        fields["enable_dp_lm_head"] = True
    if engine.drafts:
        fields |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
        fields |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    return ServerArgs(**fields)


@contextmanager
def process_groups(arguments: ServerArgs) -> Iterator[ServerArgs]:
    """Initialise SGLang's process groups of the whole engine in this process."""
    new_group = torch.distributed.new_group

    def fake(*positional: Any, **options: Any) -> Any:
        return new_group(*positional, **(options | {"backend": "fake"}))

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.distributed, "new_group", fake))
        stack.enter_context(patch.object(pynccl, "PyNcclCommunicator", _NoCommunicator))
        # DeepEP and DeepGEMM need GPUs; neither holds weights.
        stack.enter_context(patch.object(fused_moe, "create_moe_dispatcher", lambda *_, **__: None))
        stack.enter_context(patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True))
        stack.enter_context(envs.SGLANG_USE_MESSAGE_QUEUE_BROADCASTER.override(False))
        stack.callback(_forget)
        size = arguments.tp_size
        runtime_context.publish(
            arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        )
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        parallel_state.init_distributed_environment(size, 0, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        initialize_dp_attention(arguments)
        moe.initialize_moe_config()
        yield arguments


class _NoCommunicator:
    """Stands for NCCL, which needs GPUs."""

    disabled = True

    def __init__(self, *_positional: Any, **_options: Any) -> None:
        pass


def _forget() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    runtime_context.reset_context()


if __name__ == "__main__":
    print("\n" + json.dumps(compare(json.loads(sys.stdin.read()))))
