"""Command line of an SGLang 0.5.23 server (pure)."""

import shlex

from grpo_operator.api.base import Device
from grpo_operator.api.names import AGENT_PORT, API_KEY, ENGINE_PORT, OWN_VERSION
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
# Of the engine that serves: the mounted key, and the copy that the server started with, for its agent.
API_KEY_FOLDER, API_KEY_COPY = "/etc/grpo-api", f"{MODEL_DIRECTORY}/{API_KEY}"
ROUTED_EXPERTS = "/routed-experts"  # memory that the engine and its agent share
# With it, ``/health`` answers without a generated token. Of the routes of probes, it alone needs no key.
KEYED_ENGINE_ENV = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
# It leaves SGLang's sampling as it is: the plugin gives requests without a seed one.
SERVING_ENV = {"GRPO_SAMPLING": "sglang"}
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
    prepare = _prepare(model_path)
    if engine.quantization == "fp8-block128":
        prepare += " --fp8-block128"  # written to config.json, from which SGLang reads it
    if engine.tokenizer:
        prepare += " --tokenizer"
    if turns:
        prepare += f" --turn {pod_url(_LOOPBACK, AGENT_PORT, '/turnz', tls=tls)}"
    return f"{prepare} && exec {_server(MODEL_DIRECTORY, engine, arguments, tls)}"


def serving_command(model_path: str, pool: RolloutTemplate, name: str, tls: bool = False) -> str:
    """Return the shell command of a server that loads the weights in ``model_path`` and serves them.

    ``name``: of the model in the API. ``tls``: see ``engine_command``. Sampling is SGLang's own: requests
    without a seed have none.
    """
    engine = pool.engine
    own = ["--served-model-name", name, "--weight-version", str(OWN_VERSION)]
    flag = ["--enable-deterministic-inference"] if engine.deterministic else []
    arguments = [*own, *_common_arguments(engine), *_kind_arguments(engine), *flag, *engine.extra_args]
    prepare = f"{_prepare(model_path)} --api-key {API_KEY_FOLDER}/{API_KEY}"
    return f"{prepare} && exec {_server(shlex.quote(model_path), engine, arguments, tls)}"


def _prepare(model_path: str) -> str:
    return f"python3 -m grpo_worker.rollout.sglang.prepare {shlex.quote(model_path)} {MODEL_DIRECTORY}"


def _server(model: str, engine: EngineSpec, arguments: list[str], tls: bool) -> str:
    """Return the command of the server, which serves the ``model`` of that folder."""
    several = engine.nodes_per_engine > 1
    hostz = pod_url(_LOOPBACK, AGENT_PORT, "/hostz", tls=tls)
    rounds = f"--rounds {hostz} " if several else ""
    server = f"python3 -m grpo_worker.rollout.sglang.engine_process {rounds}python3 -m sglang.launch_server"
    server += f" --model-path {model} {shlex.join(arguments)}"
    server += f' --admin-api-key "$(cat {ADMIN_KEY})"'
    if several:  # engine_process adds --dist-init-addr: a replaced first host has another address
        server += f' --nnodes {engine.nodes_per_engine} --node-rank "$HOST_INDEX"'
    return server


def _arguments(engine: EngineSpec) -> list[str]:
    """Return the arguments that the fields set for an engine whose weights a job writes."""
    arguments = [
        *("--load-format", "dummy"),
        *_common_arguments(engine),
        "--incremental-streaming-output",  # else each part of a stream repeats the whole answer
        *("--random-seed", "0"),
        *_kind_arguments(engine),
    ]
    if engine.device == Device.CUDA:
        # Of SGLang's samplers for GPUs only this one draws by the seed of the request.
        arguments += ["--sampling-backend", "pytorch"]
    flags = {
        "--enable-deterministic-inference": engine.is_deterministic,
        "--skip-tokenizer-init": not engine.tokenizer,
        "--enable-return-routed-experts": engine.return_routed_experts,
    }
    return arguments + [flag for flag, given in flags.items() if given]


def _common_arguments(engine: EngineSpec) -> list[str]:
    return [
        "--dtype", engine.dtype,
        *_parallel_sizes(engine),
        "--context-length", str(engine.context_length),
        "--max-running-requests", str(engine.max_running_requests),
        "--skip-server-warmup",
        "--host", "0.0.0.0",
        "--port", str(ENGINE_PORT),
    ]  # fmt: skip


def _kind_arguments(engine: EngineSpec) -> list[str]:
    """Return the arguments that follow from the device, the KV cache and speculative decoding."""
    memory = ["--mem-fraction-static", str(engine.memory_fraction)]
    arguments = list(_CPU) if engine.device == Device.CPU else memory
    if engine.max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(engine.max_total_tokens)]
    if engine.speculative == "mtp":
        arguments += _draft(engine.speculative_num_steps)
    return arguments


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
