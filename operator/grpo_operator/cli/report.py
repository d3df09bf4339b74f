"""Formats a job's plan as plain data and as a table (pure)."""

from dataclasses import asdict
from typing import Any

from grpo_operator.api.base import Device
from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.cli.step_report import step_as_data, step_as_table
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
            "total": stage.total,
        }
        for stage in plan.stages
    ]
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
            "gpus": trainer.world,
            "gpu_type": trainer.gpu_type,
            "spare_nodes": trainer.spare_nodes,
        },
        "rollout": {
            "engines": pool.replicas,
            "nodes": pool.replicas * engine.nodes_per_engine,
            "gpus": pool.replicas * engine.tensor_parallel,
            "gpu_type": engine.gpu_type,
        },
    }


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
    assert plan.model is not None
    engine = pool.engine
    network = GPUS[engine.gpu_type].network
    bound = transfer_bounds.sync_bound(
        plan.model, plan.layout, plan.engine, pool.replicas, network, engine.gpus_per_node,
        spec.model.multi_token_prediction,
    )  # fmt: skip
    return {
        "version_bytes": bound.version_bytes,
        "received_bytes": bound.received_bytes,
        "lower_bound_seconds": bound.seconds,
    }


def as_table(data: dict[str, Any]) -> str:
    """Return the plan as a table for people."""
    trainer, rollout = data["pools"]["trainer"], data["pools"]["rollout"]
    lines = [
        f"training pool   {trainer['nodes']} nodes, {trainer['gpus']} x {trainer['gpu_type']}"
        + (f", and {trainer['spare_nodes']} spare nodes" if trainer["spare_nodes"] else ""),
        f"rollout pool    {rollout['engines']} engines on {rollout['nodes']} nodes, "
        f"{rollout['gpus']} x {rollout['gpu_type']}{_SHARED if data['mode'] == 'colocated' else ''}",
        f"layout          {data['layout']} ({data['reason']})",
        f"recomputation   {data['recompute']}",
        f"offloading      {data['offload']}",
        f"weight path     {data['weight_path']}",
        *_requests(data["resources"]),
        _limits(data["deadlines"]),
    ]
    if not data["stages"]:
        return "\n".join([*lines, "memory          unknown: set spec.model.architecture"])
    columns = ("weights", "gradients", "optimizer", "activations", "other", "total")
    lines += ["", "GB per GPU" + " " * 6 + "layers" + "".join(f"{name:>13}" for name in columns)]
    lines += [
        f"  stage {stage['stage'] + 1:<8}{stage['layers']:>6}"
        + "".join(f"{stage[name] / 1e9:>13.1f}" for name in columns)
        for stage in data["stages"]
    ]
    lines += [f"  usable {' ' * 13}{' ' * 13 * 5}{data['usable_per_gpu'] / 1e9:>13.1f}", ""]
    if "engine" in data:
        engine = data["engine"]
        lines.append(
            f"engine          {engine['weights'] / 1e9:.1f} GB of weights, {engine['kv_cache'] / 1e9:.1f} GB "
            f"of KV cache per GPU: {engine['kv_tokens']} tokens per replica, {engine['wanted_tokens']} needed"
        )
    checkpoint, sync = data["checkpoint"], data["sync"]
    lines.append(
        f"checkpoint      {checkpoint['bytes'] / 1e12:.2f} TB, {checkpoint['seconds']:.0f} s to write"
    )
    lines.append(
        f"weight sync     {sync['version_bytes'] / 1e9:.0f} GB per version, "
        f"{sync['received_bytes'] / 1e12:.2f} TB into the engines, "
        f"at least {sync['lower_bound_seconds']:.2f} s"
    )
    if "host" in data:
        lines += _host(data["host"])
    if "step" in data:
        lines += ["", *step_as_table(data["step"])]
    return "\n".join(lines)


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
    """Return the lines about host memory, in GiB."""
    size = {name: f"{amount / 2**30:.0f} GiB" for name, amount in host.items()}
    names = ("moved", "saving", *(["exporting"] if host["exporting"] else []), "copies", "staged")
    parts = ", ".join(f"{name} {size[name]}" for name in names)
    trainer, rollout = (f"{host[name] / 2**20:,.0f} MiB" for name in ("trainer_agent", "agent"))
    return [
        f"host memory     training pod {size['trainer']} ({parts}), /dev/shm {size['shared']}",
        f"                engine's pod {size['engine']}, controller {size['controller']}, "
        f"head {size['head']}",
        f"                agents: of a training pod {trainer}, of an engine {rollout}",
    ]
