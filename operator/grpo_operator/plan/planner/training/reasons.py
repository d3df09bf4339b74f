"""Why a layout is chosen, and what to change where none is (pure)."""

from collections.abc import Sequence
from dataclasses import replace

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.recompute import FULL
from grpo_operator.plan.planner.engines.room import gigabytes
from grpo_operator.plan.planner.log_probs import lower_log_probs
from grpo_operator.plan.planner.training.search import Choice, TrainingPool, feasible, fits, nearest, worst


def fastest(options: Sequence[Choice]) -> str:
    """Return why the first of the layouts that fit is chosen."""
    best, training, cost = options[0].layout, options[0].pool, options[0].cost
    text = (
        f"{best}: fastest by estimate of {len(options)} layouts that fit; "
        f"{cost.total:.1f} s for an optimizer step over {training.sequences} sequences of the full length of "
        f"{training.sequence} tokens, of which {cost.compute:.1f} s are computation; "
        f"the largest other cost is {cost.largest}"
    )
    if len(options) > 1:
        text += f"; next is {options[1].layout} with {options[1].cost.total:.1f} s"
    return text


def beside_layout(choice: Choice, pools: Sequence[TrainingPool], given: OffloadSpec) -> str:
    """Return the end of a reason: how it was chosen from ``pools`` what is recomputed and offloaded.

    ``given``: what the job offloads at least.
    """
    return _of_recompute(choice, pools) + _of_offload(choice, given)


def _of_recompute(choice: Choice, pools: Sequence[TrainingPool]) -> str:
    kinds = list(dict.fromkeys(pool.recompute.kind for pool in pools))
    if len(kinds) == 1:
        return ""
    kind = choice.pool.recompute.kind
    return f"; recompute={kind}: fastest by estimate of {', '.join(kinds)} that fits"


def _of_offload(choice: Choice, given: OffloadSpec) -> str:
    offload = choice.pool.offload
    added = [
        f"offload.{name}"
        for name in ("optimizer", "activations")
        if getattr(offload, name) != getattr(given, name)
    ]
    return f"; {' and '.join(added)}: does not fit without" if added else ""


def of_room(choice: Choice) -> str:
    """Return the end of a given layout's reason: how little it leaves, if that is less than the margin."""
    pool = choice.pool
    left = pool.gpu.usable - worst(pool.memory(choice.layout)).total
    if left < 0 or left >= pool.gpu.usable - pool.safe:
        return ""
    return (
        f"; leaves {gigabytes(left)} of each GPU of its fullest stage, less than the "
        f"{gigabytes(pool.gpu.usable - pool.safe)} by which the planner can be wrong"
    )


def no_layout(pools: Sequence[TrainingPool], auto: bool) -> str:
    """Return why no layout is chosen. ``auto``: the operator may offload more than the job asks for."""
    first = pools[0]
    tight = [Choice(pool, layout) for pool in pools for layout in feasible(pool)]
    if not tight:
        fit, given = f"fits {gigabytes(first.gpu.usable)}", ""
    else:
        best = min(tight, key=lambda choice: worst(choice.pool.memory(choice.layout)).total)
        need = gigabytes(worst(best.pool.memory(best.layout)).total)
        fit = f"leaves {gigabytes(first.gpu.usable - first.safe)} of {gigabytes(first.gpu.usable)} free"
        given = f"give {best.layout}, which needs {need} by estimate, "
    offload = "" if auto else "set spec.trainer.offload.auto, "
    return (
        f"no layout of {first.world} GPUs {fit}: {lower_log_probs(first)}{without_overlap(first)}{given}add "
        f"nodes, shorten data.promptLength + data.responseLength, {offload}or use GPUs with more memory"
    )


def remedy(training: TrainingPool, layout: Layout) -> str:
    """Return what to change where a layout needs too much memory."""
    everything = replace(training, recompute=FULL)
    if training.recompute != FULL and not training.offload.activations and fits(everything, layout):
        memory = gigabytes(worst(everything.memory(layout)).total)
        return f"set spec.trainer.recompute to full ({memory}) or auto"
    other = nearest(training, layout)
    if other is None:
        return f"no layout of this pool fits: {without_overlap(training)}add nodes or shorten the sequences"
    return f"try {other} ({gigabytes(worst(training.memory(other)).total)})"


def without_overlap(training: TrainingPool) -> str:
    """Return the remedy against a condition on layouts that the job sets, with a comma after it, or ""."""
    return "set spec.trainer.moe.overlapCommunication to false, " * training.moe.overlap_communication
