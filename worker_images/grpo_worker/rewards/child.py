"""The process in which a user's reward function runs: ``python -m grpo_worker.rewards.child``."""

import json
import os
import resource
import sys
from typing import Any

from grpo_worker.data.entry_point import load_function


def main() -> None:
    """Limit memory, load the function, then answer line by line until the pipe closes."""
    name, megabytes = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the function prints goes to the log
    limit = int(megabytes) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function = load_function("spec.reward.function", name)
    except Exception as error:  # whatever a user's module raises
        answers.write(json.dumps({"error": f"{error}"}) + "\n")
        return
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(_answer(function, json.loads(line))) + "\n")


def _answer(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        found = function(**arguments)
        return {"score": float(found["score"] if isinstance(found, dict) else found)}
    except MemoryError:
        return {"error": "MemoryError: more than spec.reward.memoryMegabytes"}
    except Exception as error:  # whatever a user's function raises
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
