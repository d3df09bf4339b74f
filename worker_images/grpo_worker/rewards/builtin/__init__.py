"""Verifiers for common kinds of answers, by the names that ``spec.reward.builtin`` takes.

Each is a function ``compute_score(solution_str, ground_truth, timeout_seconds)`` that runs in the same
processes as users' functions.
"""

BUILTIN = {
    name: f"grpo_worker.rewards.builtin.{module}:compute_score"
    for name, module in (
        ("math", "math_answer"),
        ("code", "code_tests"),
        ("json", "json_value"),
        ("choice", "choice_letter"),
    )
}


class GroundTruthError(ValueError):
    """The row's ground truth is not what the verifier needs."""
