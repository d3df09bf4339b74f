"""Why a layout is chosen, and what to change where none is (pure)."""

from collections.abc import Sequence
from dataclasses import replace

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import FULL
from grpo_operator.plan.planner.engines.room import gigabytes
from grpo_operator.plan.planner.training.search import Choice, TrainingPool, fits, nearest, worst


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


def of_recompute(choice: Choice, pools: Sequence[TrainingPool]) -> str:
    """Return the end of a reason: how it was chosen from ``pools`` what is recomputed; "" if it was given."""
    if len(pools) == 1:
        return ""
    kinds = ", ".join(pool.recompute.kind for pool in pools)
    return f"; recompute={choice.pool.recompute.kind}: fastest by estimate of {kinds} that fits"


def remedy(training: TrainingPool, layout: Layout) -> str:
    """Return what to change where a layout needs too much memory."""
    everything = replace(training, recompute=FULL)
    if training.recompute != FULL and fits(everything, layout):
        memory = gigabytes(worst(everything.memory(layout)).total)
        return f"set spec.trainer.recompute to full ({memory}) or auto"
    other = nearest(training, layout)
    if other is None:
        return f"no layout of this pool fits: {without_overlap(training)}add nodes or shorten the sequences"
    return f"try {other} ({gigabytes(worst(training.memory(other)).total)})"


def without_overlap(training: TrainingPool) -> str:
    """Return the remedy against a condition on layouts that the job sets, with a comma after it, or ""."""
    return "set spec.trainer.moe.overlapCommunication to false, " * training.moe.overlap_communication
