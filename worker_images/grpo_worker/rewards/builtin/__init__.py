"""Built-in verifiers for common kinds of answers, under the names of ``spec.reward.builtin``.

Each is a function ``compute_score(solution_str, ground_truth, timeout_seconds)`` that runs in a reward
process, as users' functions do.
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
    """The verifier cannot use the row's ground truth."""
