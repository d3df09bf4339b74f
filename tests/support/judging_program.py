"""Judge a right program by ``reward.builtin: code`` where calls fail: arguments SANDBOX ERROR NUMBER..."""

import sys

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import Record
from grpo_worker.rewards.base import Item, RewardError
from grpo_worker.rewards.function import FunctionVerifier
from grpo_worker.rewards.sandbox_problem import sandbox_problem
from support.call_filter import refuse

TESTS = {"inputs": ["1"], "outputs": ["1"]}


def main() -> None:
    sandbox, error, *numbers = sys.argv[1:]
    refuse([int(number) for number in numbers], int(error))
    fields = {"builtin": "code", "sandbox": sandbox, "workers": 1, "onFailure": "stop"}
    spec = RewardSpec.model_validate(fields)
    judge = FunctionVerifier(spec)
    item = Item(0, "print(input())", Record("mine", TESTS, {}))
    try:
        judge.check(item)
        print("score", *judge.score([item]), sandbox_problem(spec))
    except RewardError as problem:
        print("error", problem)


if __name__ == "__main__":
    main()
