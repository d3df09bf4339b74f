"""Causes for which a running job makes no or slow progress (pure)."""

from collections.abc import Iterator
from typing import Any

from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.status.checkpoints import copies_problem
from grpo_operator.plan.status.conditions import NO_PROBLEM, Problem
from grpo_operator.plan.status.stragglers import straggler_problem

_MAX_FAILURES = 3  # container failures quoted in one message


def problem_of(phase: Phase, observed: Observed) -> Problem:
    """Return why a running job makes no or slow progress: the most urgent cause."""
    if phase not in (Phase.STARTING, Phase.TRAINING, Phase.RECOVERING):
        return NO_PROBLEM
    return next((problem for problem in _problems(phase, observed) if problem.message), NO_PROBLEM)


def cause_of_end(phase: Phase, observed: Observed, failed: dict[str, Any]) -> str:
    """Return the reason why a job has failed, if it has one besides its message; "" otherwise.

    ``failed``: the condition Failed so far; {} if there is none. It has the reason when the controller is
    gone.
    """
    if phase != Phase.FAILED:
        return ""
    regressed, diverged = Problem("ValidationRegressed"), Problem("Diverged")
    controller = observed.controller
    for problem, reported in (
        (regressed, controller is not None and controller.regressed),
        (diverged, controller is not None and controller.diverged),
    ):
        known = failed.get("status") == "True" and failed["reason"] == problem.reason
        if known or reported:
            return problem.reason
    return ""


def _problems(phase: Phase, observed: Observed) -> Iterator[Problem]:
    """Yield the possible causes, the most urgent first; those that are not there have no message."""
    controller, nodes = observed.controller, observed.node_problem
    if controller and controller.waiting:
        yield Problem("Parked", "; ".join(filter(None, (controller.waiting, nodes))))
    if controller and controller.stalled:
        yield Problem("NoSamples", "; ".join(filter(None, (controller.stalled, nodes))))
    yield Problem("NodeNotReady", nodes)
    yield Problem("UnhealthyNodes", observed.held_pods)
    failures = observed.container_failures()[:_MAX_FAILURES]
    yield Problem("ContainersFailing", "; ".join(failure.text for failure in failures))
    yield Problem("Unschedulable", observed.unschedulable())
    yield Problem("PodsRefused", observed.ray_cluster.refusal if observed.ray_cluster else "")
    if controller is None:
        return
    yield Problem("StoreFull", controller.checkpoint_problem)
    yield copies_problem(controller)
    if phase != Phase.RECOVERING:
        yield straggler_problem(observed)
        yield Problem("NoRdma", controller.network_problem)
    yield Problem("NoLandlock", controller.sandbox_problem)
