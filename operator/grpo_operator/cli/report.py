"""Formats a job's plan as plain data and as a table (pure)."""

from dataclasses import asdict
from typing import Any

from grpo_operator.api.base import Device
from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.cli.step_report import step_as_data, step_as_table
from grpo_operator.cli.units import binary_size, count, duration, size
from grpo_operator.plan.planner import transfer_bounds
from grpo_operator.plan.planner.deadlines import completed_deadlines
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.resolve import JobPlan
from grpo_operator.plan.planner.resources import completed_job, completed_template
from grpo_operator.plan.planner.step.job import Assumptions, step_model

_SHARED = ", shared with the training pool"


def as_data(
    spec: GRPOJobSpec,
    pool: RolloutTemplate,
    plan: JobPlan,
    store_speed: float,
    assumed: Assumptions | None = None,
) -> dict[str, Any]:
    """Return the figures of the table, in bytes and seconds. ``store_speed``: bytes/s of one node."""
    data: dict[str, Any] = {
        "mode": spec.mode,
        "pools": _pools(spec, pool),
        "layout": str(plan.layout),
        "reason": plan.reason,
        "recompute": str(plan.recompute),
        "offload": str(plan.offload),
        "weight_path": str(plan.weight_path),
        "resources": _resources(spec, pool, plan),
        "deadlines": _deadlines(spec, pool, plan),
        "stages": [],
    }
    if plan.model is None or plan.training is None:
        return data
    data["stages"] = [
        {
            "stage": stage.stage,
            "layers": stage.layers,
            "weights": stage.weights,
            "gradients": stage.gradients,
            "optimizer": stage.optimizer,
            "activations": stage.activations + stage.working,
            "other": stage.frozen + stage.sync,
            "nccl": stage.nccl,
            "total": stage.total,
        }
        for stage in plan.stages
    ]
    if spec.trainer.device is Device.CUDA:
        data["usable_per_gpu"] = plan.training.gpu.usable
    data["checkpoint"] = _checkpoint(spec, plan, store_speed)
    data["sync"] = _sync(spec, pool, plan)
    if plan.engine_memory is not None:
        memory = plan.engine_memory
        data["engine"] = {
            "weights": memory.weights,
            "kv_cache": memory.kv_cache,
            "kv_tokens": memory.kv_tokens,
            "wanted_tokens": memory.wanted_tokens,
        }
    if plan.host is not None:
        data["host"] = asdict(plan.host)
    model = step_model(spec, pool, plan, assumed)
    if model is not None:
        data["step"] = step_as_data(model)
    return data


def _pools(spec: GRPOJobSpec, pool: RolloutTemplate) -> dict[str, Any]:
    trainer, engine = spec.trainer, pool.engine
    return {
        "trainer": {
            "nodes": trainer.nodes,
            "spare_nodes": trainer.spare_nodes,
            **_devices(trainer.device, trainer.world, trainer.gpu_type),
        },
        "rollout": {
            "engines": pool.replicas,
            "nodes": pool.replicas * engine.nodes_per_engine,
            **_devices(engine.device, pool.replicas * engine.tensor_parallel, engine.gpu_type),
        },
    }


def _devices(device: Device, ranks: int, gpu_type: str) -> dict[str, Any]:
    """Return the ranks of a pool, and its GPUs where it has any."""
    found: dict[str, Any] = {"device": str(device), "ranks": ranks}
    return found | ({"gpus": ranks, "gpu_type": gpu_type} if device is Device.CUDA else {})


def _resources(spec: GRPOJobSpec, pool: RolloutTemplate, plan: JobPlan) -> dict[str, Any]:
    """Return the resources with which the pods are rendered: those of the spec, else the planned ones."""
    job = completed_job(spec, plan.resources)
    engines = completed_template(pool, plan.resources)
    resources: dict[str, Any] = {
        "controller": job.controller.resources.requests(),
        "trainer": job.trainer.resources.requests(),
        "engine": engines.resources.requests(),
    }
    if spec.trainer.device is Device.CUDA:
        resources["shared_memory"] = job.scheduling.shared_memory
    if pool.engine.return_routed_experts:
        resources["routed_experts"] = f"{engines.engine.routed_experts_gibibytes}Gi"
    return resources


def _deadlines(spec: GRPOJobSpec, pool: RolloutTemplate, plan: JobPlan) -> dict[str, Any]:
    """Return the seconds without progress after which a wait ends, and the longest units of work."""
    job = completed_deadlines(spec, plan.deadlines)
    return {
        "hang": job.restart_policy.hang_limit,
        "timeout": job.weight_sync.patience,
        "start": pool.engine.start_seconds,
        "grace": job.restart_policy.grace_limit,
    } | (asdict(plan.units) if plan.units else {})


def _checkpoint(spec: GRPOJobSpec, plan: JobPlan, store_speed: float) -> dict[str, float]:
    assert plan.model is not None
    mtp = spec.model.multi_token_prediction
    size = transfer_bounds.checkpoint_bytes(plan.model, mtp)
    if spec.fills_engines_from_store:
        size += parameters.model_bytes(plan.model, plan.engine.fp8, mtp)
    return {"bytes": size, "seconds": size / (store_speed * spec.trainer.nodes)}


def _sync(spec: GRPOJobSpec, pool: RolloutTemplate, plan: JobPlan) -> dict[str, float]:
    """Return the bytes of a weight update, and on GPUs its shortest time."""
    assert plan.model is not None
    engine = pool.engine
    network = GPUS[engine.gpu_type].network
    bound = transfer_bounds.sync_bound(
        plan.model, plan.layout, plan.engine, pool.replicas, network, engine.gpus_per_node,
        spec.model.multi_token_prediction,
    )  # fmt: skip
    sent: dict[str, float] = {
        "version_bytes": bound.version_bytes,
        "received_bytes": bound.received_bytes,
    }
    return sent | ({"lower_bound_seconds": bound.seconds} if engine.device is Device.CUDA else {})


def as_table(data: dict[str, Any]) -> str:
    """Return the plan as a table for people."""
    trainer, rollout = data["pools"]["trainer"], data["pools"]["rollout"]
    lines = [
        f"training pool   {count(trainer['nodes'], 'node')}, {_processors(trainer)}"
        + (f", and {count(trainer['spare_nodes'], 'spare node')}" if trainer["spare_nodes"] else ""),
        f"rollout pool    {count(rollout['engines'], 'engine')} on {count(rollout['nodes'], 'node')}, "
        f"{_processors(rollout)}{_SHARED if data['mode'] == 'colocated' else ''}",
        f"layout          {data['layout']} ({data['reason']})",
        f"recomputation   {data['recompute']}",
        f"offloading      {data['offload']}",
        f"weight path     {data['weight_path']}",
        *_requests(data["resources"]),
        _limits(data["deadlines"]),
    ]
    if not data["stages"]:
        return "\n".join([*lines, "memory          unknown: set spec.model.architecture"])
    lines += ["", *_memory(data), ""]
    if "engine" in data:
        engine = data["engine"]
        lines.append(
            f"engine          {size(engine['weights'])} of weights, {size(engine['kv_cache'])} "
            f"of KV cache per GPU: {engine['kv_tokens']} tokens per replica, {engine['wanted_tokens']} needed"
        )
    checkpoint, sync = data["checkpoint"], data["sync"]
    lines.append(f"checkpoint      {size(checkpoint['bytes'])}, {duration(checkpoint['seconds'])} to write")
    bound = sync.get("lower_bound_seconds")
    lines.append(
        f"weight sync     {size(sync['version_bytes'])} per version, {size(sync['received_bytes'])} "
        "into the engines" + (f", at least {duration(bound)}" if bound is not None else "")
    )
    if "host" in data:
        lines += _host(data["host"])
    if "step" in data:
        lines += ["", *step_as_table(data["step"])]
    return "\n".join(lines)


def _processors(pool: dict[str, Any]) -> str:
    return f"{pool['gpus']} x {pool['gpu_type']}" if "gpus" in pool else count(pool["ranks"], "CPU rank")


def _memory(data: dict[str, Any]) -> list[str]:
    """Return the table of the training ranks' memory, in a unit that suits the largest stage."""
    usable = data.get("usable_per_gpu")
    nccl = {} if usable is None else {"nccl": "NCCL"}
    names = ("weights", "gradients", "optimizer", "activations", "other")
    columns = {**{name: name for name in names}, **nccl, "total": "total"}
    small = max(stage["total"] for stage in data["stages"]) < 1e9
    unit, factor = ("MB", 1e6) if small else ("GB", 1e9)
    title = f"{unit} per {'rank' if usable is None else 'GPU'}"
    lines = [f"{title:<16}layers" + "".join(f"{name:>13}" for name in columns.values())]
    lines += [
        f"  stage {stage['stage'] + 1:<8}{stage['layers']:>6}"
        + "".join(f"{stage[name] / factor:>13.1f}" for name in columns)
        for stage in data["stages"]
    ]
    if usable is not None:
        lines.append(f"  usable {' ' * 13}{' ' * 13 * (len(columns) - 1)}{usable / factor:>13.1f}")
    return lines


def _requests(resources: dict[str, Any]) -> list[str]:
    """Return the lines about the resources of the pods."""
    texts = [
        f"{name} {resources[name]['cpu']} CPU and {resources[name]['memory']}"
        for name in ("controller", "trainer", "engine")
    ]
    memory = [
        f"{text} {resources[name]}"
        for name, text in (("shared_memory", "/dev/shm"), ("routed_experts", "routed experts"))
        if name in resources
    ]
    return [f"resources       {', '.join(texts + memory)}"]


def _limits(deadlines: dict[str, Any]) -> str:
    """Return the line about deadlines without progress."""
    names = (("trainers", "hang", "rank", "micro-batch"), ("weights", "timeout", "wave", "wave"))
    texts = [
        f"{name} {deadlines[limit]} s" + (f" ({what} {deadlines[unit]:.2g} s)" if unit in deadlines else "")
        for name, limit, unit, what in names
    ]
    return (
        f"no progress     {', '.join(texts)}, start of an engine {deadlines['start']} s\n"
        f"grace           {deadlines['grace']} s for pods that are deleted, in which steps are saved"
    )


def _host(host: dict[str, int]) -> list[str]:
    """Return the lines about host memory."""
    amount = {name: binary_size(given) for name, given in host.items()}
    names = ("moved", "saving", *(["exporting"] if host["exporting"] else []), "copies", "staged")
    parts = ", ".join(f"{name} {amount[name]}" for name in names)
    trainer, rollout = (f"{host[name] / 2**20:,.0f} MiB" for name in ("trainer_agent", "agent"))
    return [
        f"host memory     training pod {amount['trainer']} ({parts}), /dev/shm {amount['shared']}",
        f"                engine's pod {amount['engine']}, controller {amount['controller']}, "
        f"head {amount['head']}",
        f"                agents: of a training pod {trainer}, of an engine {rollout}",
    ]
