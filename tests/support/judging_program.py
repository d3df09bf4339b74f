"""Judge a right program by ``reward.builtin: code`` where calls fail: arguments SANDBOX ERROR NUMBER..."""

import sys

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import Record
from grpo_worker.rewards.base import Item, RewardError
from grpo_worker.rewards.function import FunctionVerifier
from support.call_filter import refuse

TESTS = {"inputs": ["1"], "outputs": ["1"]}


def main() -> None:
    sandbox, error, *numbers = sys.argv[1:]
    refuse([int(number) for number in numbers], int(error))
    judge = FunctionVerifier(
        RewardSpec.model_validate({"builtin": "code", "sandbox": sandbox, "workers": 1, "onFailure": "stop"})
    )
    item = Item(0, "print(input())", Record("mine", TESTS, {}))
    try:
        judge.check(item)
        print("score", *judge.score([item]))
    except RewardError as problem:
        print("error", problem)


if __name__ == "__main__":
    main()
