"""Command line of an SGLang 0.5.23 server (pure)."""

import shlex

from grpo_operator.api.base import Device
from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT, RENDEZVOUS_PORT, Owner
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutTemplate

# Backends that run without compiled CPU kernels.
_CPU = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # else an idle scheduler polls without a pause, and trainers need the cores
]
MODEL_DIRECTORY = "/tmp/model"  # holds the engine's config.json, which its agent reads too
TURNS = f"{MODEL_DIRECTORY}/turns.json"  # GPU memory that the engine holds, for an agent that restarts
ADMIN_KEY = f"{MODEL_DIRECTORY}/admin-key"  # protects the routes that pause the engine and write weights
ROUTED_EXPERTS = "/routed-experts"  # memory that the engine and its agent share
CPU_ENGINE_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "grpo_cpu,grpo_weights,grpo_sampling",
    "TORCHDYNAMO_DISABLE": "1",  # inductor would need a C++ compiler in the image
}


def engine_command(owner: Owner, model_path: str, pool: RolloutTemplate, turns: bool = False) -> str:
    """Return the shell command that writes the model's configuration and then becomes the server.

    ``turns``: the GPUs are shared with trainers. The server then starts only when its agent allows it, and it
    can release its GPU memory. The server reads no weights: it starts with dummy weights and serves nothing
    until its agent has loaded the pool's version.
    """
    engine = pool.engine
    arguments = [*_arguments(engine), *(["--enable-memory-saver"] if turns else []), *engine.extra_args]
    prepare = f"python3 -m grpo_worker.rollout.sglang.prepare {shlex.quote(model_path)} {MODEL_DIRECTORY}"
    if engine.quantization == "fp8-block128":
        prepare += " --fp8-block128"  # written to config.json, from which SGLang reads it
    if engine.tokenizer:
        prepare += " --tokenizer"
    if turns:
        prepare += f" --turn http://127.0.0.1:{AGENT_PORT}/turnz"
    server = "python3 -m grpo_worker.rollout.sglang.engine_process python3 -m sglang.launch_server"
    server += f" --model-path {MODEL_DIRECTORY} {shlex.join(arguments)}"
    server += f' --admin-api-key "$(cat {ADMIN_KEY})"'
    if engine.nodes_per_engine > 1:
        server += _several_hosts(owner, engine.nodes_per_engine)
    return f"{prepare} && exec {server}"


def _arguments(engine: EngineSpec) -> list[str]:
    """Return the arguments that the fields set."""
    arguments = [
        "--load-format", "dummy",
        "--dtype", engine.dtype,
        *_parallel_sizes(engine),
        "--context-length", str(engine.context_length),
        "--max-running-requests", str(engine.max_running_requests),
        "--skip-server-warmup",
        "--incremental-streaming-output",  # else each part of a stream repeats the whole answer
        "--random-seed", "0",
        "--host", "0.0.0.0",
        "--port", str(ENGINE_PORT),
    ]  # fmt: skip
    if engine.device == Device.CPU:
        arguments += _CPU
    else:
        arguments += ["--mem-fraction-static", str(engine.memory_fraction)]
        # Of SGLang's samplers for GPUs only this one draws by the seed of the request.
        arguments += ["--sampling-backend", "pytorch"]
    if engine.max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(engine.max_total_tokens)]
    if engine.speculative == "mtp":
        arguments += ["--speculative-algorithm", "NEXTN"]
    flags = {
        "--enable-deterministic-inference": engine.is_deterministic,
        "--skip-tokenizer-init": not engine.tokenizer,
        "--enable-return-routed-experts": engine.return_routed_experts,
    }
    return arguments + [flag for flag, given in flags.items() if given]


def _parallel_sizes(engine: EngineSpec) -> list[str]:
    arguments = ["--tp-size", str(engine.tensor_parallel), "--ep-size", str(engine.expert_parallel)]
    if engine.attention_data_parallel > 1:
        arguments += ["--dp-size", str(engine.attention_data_parallel), "--enable-dp-attention"]
        arguments += ["--moe-dense-tp-size", "1"]
    if engine.dp_lm_head:
        arguments.append("--enable-dp-lm-head")
    if engine.moe_a2a_backend != "none":
        arguments += ["--moe-a2a-backend", engine.moe_a2a_backend]
    return arguments


def _several_hosts(owner: Owner, hosts: int) -> str:
    """Return the arguments that differ by pod; the shell reads them from the env of KubeRay's labels."""
    first = f"{owner.name}-$GROUP-$REPLICA_INDEX:{RENDEZVOUS_PORT}"
    return f' --nnodes {hosts} --node-rank "$HOST_INDEX" --dist-init-addr "{first}"'
