"""Command line of an SGLang 0.5.23 server (pure)."""

import shlex

from grpo_operator.api.base import Device
from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT, RENDEZVOUS_PORT, Owner
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate

# The plain backends that run without compiled CPU kernels; seeds make samples reproducible.
_CPU = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # an idle scheduler polls without a pause, and the trainers need the cores
]
MODEL_DIRECTORY = "/tmp/model"  # the engine's config.json; its agent reads it too
TURNS = f"{MODEL_DIRECTORY}/turns.json"  # what an agent that restarts must know of its engine's memory
ADMIN_KEY = f"{MODEL_DIRECTORY}/admin-key"  # without it nobody pauses the engine or writes its weights
CPU_ENGINE_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "grpo_cpu,grpo_weights,grpo_sampling",
    "TORCHDYNAMO_DISABLE": "1",  # inductor would need a C++ compiler in the image
}


def engine_command(owner: Owner, model_path: str, pool: RolloutTemplate, turns: bool = False) -> str:
    """Shell command that writes the model's configuration and becomes the server. ``turns``: it
    starts when its agent says that the GPUs, shared with trainers, are its own, and can give memory back.

    Weights are not read: the server starts with dummy ones and serves nothing until its agent
    has loaded the pool's version.
    """
    engine = pool.engine
    arguments = [
        "--load-format", "dummy",
        "--dtype", engine.dtype,
        "--tp-size", str(engine.tensor_parallel),
        "--ep-size", str(engine.expert_parallel),
        "--context-length", str(engine.context_length),
        "--max-running-requests", str(engine.max_running_requests),
        "--skip-server-warmup",
        "--enable-deterministic-inference",
        "--random-seed", "0",
        "--host", "0.0.0.0",
        "--port", str(ENGINE_PORT),
    ]  # fmt: skip
    if not engine.tokenizer:
        arguments.append("--skip-tokenizer-init")
    if engine.max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(engine.max_total_tokens)]
    if engine.attention_data_parallel > 1:
        arguments += ["--dp-size", str(engine.attention_data_parallel), "--enable-dp-attention"]
        arguments += ["--moe-dense-tp-size", "1"]
    if engine.device == Device.CPU:
        arguments += _CPU
    else:
        arguments += ["--mem-fraction-static", str(engine.memory_fraction)]
    if turns:
        arguments.append("--enable-memory-saver")
    if engine.return_routed_experts:
        arguments.append("--enable-return-routed-experts")
    arguments += engine.extra_args
    prepare = f"python3 -m grpo_worker.rollout.sglang.prepare {shlex.quote(model_path)} {MODEL_DIRECTORY}"
    if engine.quantization == "fp8-block128":
        prepare += " --fp8-block128"  # config.json says so, and SGLang takes it from there
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


def _several_hosts(owner: Owner, hosts: int) -> str:
    """Arguments that differ by pod; the shell fills them in from the labels that KubeRay gives."""
    first = f"{owner.name}-$GROUP-$REPLICA_INDEX:{RENDEZVOUS_PORT}"
    return f' --nnodes {hosts} --node-rank "$HOST_INDEX" --dist-init-addr "{first}"'
