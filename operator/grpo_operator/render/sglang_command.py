"""Command line of an SGLang 0.5.23 server (pure)."""

import shlex

from grpo_operator.api.base import Device
from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT
from grpo_operator.api.urls import pod_url
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
WRITER = f"{MODEL_DIRECTORY}/writer.json"  # the job and the attempt that its agent has accepted
ENGINE_LOG = f"{MODEL_DIRECTORY}/engine.log"  # lines of the server, which its agent keeps
ADMIN_KEY = f"{MODEL_DIRECTORY}/admin-key"  # protects the routes that pause the engine and write weights
ROUTED_EXPERTS = "/routed-experts"  # memory that the engine and its agent share
# With it, ``/health`` answers without a generated token. Of the routes of probes, it alone needs no key.
TLS_ENGINE_ENV = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
_LOOPBACK = "127.0.0.1"
CPU_ENGINE_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "grpo_cpu,grpo_weights,grpo_sampling",
    "TORCHDYNAMO_DISABLE": "1",  # inductor would need a C++ compiler in the image
}


def engine_command(model_path: str, pool: RolloutTemplate, turns: bool = False, tls: bool = False) -> str:
    """Return the shell command that writes the model's configuration and then becomes the server.

    ``turns``: the GPUs are shared with trainers. The server then starts only when its agent allows it, and it
    can release its GPU memory. The server reads no weights: it starts with dummy weights and serves nothing
    until its agent has loaded the pool's version. ``tls``: the agent serves HTTPS; engine_process adds the
    arguments by which the server does.
    """
    engine = pool.engine
    arguments = [*_arguments(engine), *(["--enable-memory-saver"] if turns else []), *engine.extra_args]
    prepare = f"python3 -m grpo_worker.rollout.sglang.prepare {shlex.quote(model_path)} {MODEL_DIRECTORY}"
    if engine.quantization == "fp8-block128":
        prepare += " --fp8-block128"  # written to config.json, from which SGLang reads it
    if engine.tokenizer:
        prepare += " --tokenizer"
    if turns:
        prepare += f" --turn {pod_url(_LOOPBACK, AGENT_PORT, '/turnz', tls=tls)}"
    several = engine.nodes_per_engine > 1
    hostz = pod_url(_LOOPBACK, AGENT_PORT, "/hostz", tls=tls)
    rounds = f"--rounds {hostz} " if several else ""
    server = f"python3 -m grpo_worker.rollout.sglang.engine_process {rounds}python3 -m sglang.launch_server"
    server += f" --model-path {MODEL_DIRECTORY} {shlex.join(arguments)}"
    server += f' --admin-api-key "$(cat {ADMIN_KEY})"'
    if several:  # engine_process adds --dist-init-addr: a replaced first host has another address
        server += f' --nnodes {engine.nodes_per_engine} --node-rank "$HOST_INDEX"'
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
        arguments += _draft(engine.speculative_num_steps)
    flags = {
        "--enable-deterministic-inference": engine.is_deterministic,
        "--skip-tokenizer-init": not engine.tokenizer,
        "--enable-return-routed-experts": engine.return_routed_experts,
    }
    return arguments + [flag for flag, given in flags.items() if given]


def _draft(steps: int) -> list[str]:
    """Return the arguments of a chain of ``steps`` drafted tokens, verified with the token before them."""
    chain = {"steps": steps, "draft-tokens": steps + 1}
    sizes = [text for name, size in chain.items() for text in (f"--speculative-num-{name}", str(size))]
    return ["--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1", *sizes]


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


def cpu_engine_env(engine: EngineSpec) -> dict[str, str]:
    """Return the environment of a server on CPUs."""
    if engine.tensor_parallel == 1:
        return CPU_ENGINE_ENV
    # Without cores for each rank SGLang refuses more ranks than NUMA nodes; it binds ranks only with its
    # compiled CPU kernels. It would find NCCL, whose communicator refuses a CPU.
    cores = "|".join("0" for _ in range(engine.tensor_parallel))
    return CPU_ENGINE_ENV | {"SGLANG_CPU_OMP_THREADS_BIND": cores, "SGLANG_NCCL_SO_PATH": "/nonexistent.so"}
