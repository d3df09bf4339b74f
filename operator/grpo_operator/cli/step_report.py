"""Formats the expected step as plain data and as lines of a table (pure)."""

from dataclasses import asdict
from typing import Any

from grpo_operator.cli.units import duration
from grpo_operator.plan.planner.step.cost import StepModel

_TEXTS = {
    "gen": "generation",
    "old_log_prob": "log-probabilities",
    "ref": "reference",
    "values": "critic's values",
    "reward_model": "reward model",
    "update_critic": "critic's update",
    "update_actor": "update",
    "update_weights": "weight update",
    "save_checkpoint": "checkpoint",
}


def step_as_data(model: StepModel) -> dict[str, Any]:
    """Return the seconds of each phase, their parts, and the assumptions."""
    step, made, work = model.step(), model.generation(), model.workload
    return {
        "seconds": step.total,
        "phases": step.phases(),
        "bubbles": step.bubbles,
        "gpu_hours": step.gpu_hours,
        "tokens": work.tokens,
        "overlapped": step.ahead,
        "generation": asdict(made)
        | {"replicas": model.rollout.replicas, "decode_seconds": _decode(model, made.running)},
        "forward": asdict(model.forward()),
        "update": asdict(model.update()),
        "assumed": {
            "mean_prompt": work.prompt,
            "mean_response": work.lengths.mean,
            "response_sigma": work.lengths.sigma,
            **asdict(model.efficiency),
        },
    }


def _decode(model: StepModel, running: int) -> float:
    rollout, work = model.rollout, model.workload
    engine = rollout.engine(model.model, model.efficiency)
    return engine.decode_seconds(running, work.prompt + work.lengths.mean / 2)


def step_as_table(data: dict[str, Any]) -> list[str]:
    """Return the lines of the expected step."""
    made, assumed = data["generation"], data["assumed"]
    notes = {
        "gen": f"{made['running']} sequences in each of {made['replicas']} replicas, "
        f"{1e3 * made['decode_seconds']:.0f} ms a token at the start; prefill {made['prefill']:.0f} s, "
        f"after the last sequence has a place {made['tail']:.0f} s",
        "old_log_prob": _parts(data["forward"]),
        "update_actor": _parts(data["update"]) + " in each optimizer step",
    }
    lines = [
        f"expected step   {duration(data['seconds'])}, {_hours(data['gpu_hours'])} GPU-hours for "
        f"{_tokens(data['tokens'])}"
    ]
    if data["overlapped"]:
        lines[0] += "; generation and training overlap"
    for name, seconds in data["phases"].items():
        note = f"  ({notes[name]})" if name in notes else ""
        lines.append(f"  {_TEXTS[name]:<20}{seconds:>8.1f} s{note}")
    lines.append(f"  of which bubbles    {data['bubbles']:>8.1f} s")
    lines.append(
        f"assumed         prompts of {assumed['mean_prompt']:.0f} and responses of "
        f"{assumed['mean_response']:.0f} tokens on average (log-normal, sigma {assumed['response_sigma']:g});"
    )
    lines.append(
        f"                shares of peak rates: training {assumed['flops']:.2f}, generation "
        f"{assumed['engine_flops']:.2f}, GPU memory {assumed['memory']:.2f}, links {assumed['link']:.2f}"
    )
    return lines


def _parts(cost: dict[str, float]) -> str:
    """Return the terms of a call of the trainer that are at least a tenth of a second."""
    terms = [f"{name} {seconds:.1f}" for name, seconds in cost.items() if seconds >= 0.1]
    return ", ".join(terms) + " s"


def _hours(hours: float) -> str:
    return f"{hours:.1f}" if hours >= 0.1 else f"{hours:.2g}"


def _tokens(number: float) -> str:
    return f"{number / 1e6:.1f} M tokens" if number >= 1e5 else f"{number:.0f} tokens"
