"""A double buffer's parts: the request to fetch, the second copy, and the fetch in a thread."""

import threading
from typing import Any

import pytest
import torch

from grpo_worker.weightsync.protocol.direct_load import Fetch
from grpo_worker.weightsync.sglang_plugin.background_fetch import BackgroundFetch
from grpo_worker.weightsync.sglang_plugin.second_copy import SecondCopy
from grpo_worker.weightsync.sglang_plugin.wave_receiver import Received

RECEIVED = Received(1, 2, 0, {})


def test_a_request_to_fetch_travels_as_the_name_of_a_group() -> None:
    fetch = Fetch("grpo-link-a-b", "7", 120.0)
    assert Fetch.from_group_name(fetch.to_group_name()) == fetch
    for text in ("grpo-fetch-", "grpo-fetch-[]", 'grpo-fetch-{"link": "a"}'):
        with pytest.raises(ValueError, match="is no request to fetch a version"):
            Fetch.from_group_name(text)


def test_a_second_copy_replaces_the_parameters_when_it_is_installed() -> None:
    weight, norm = torch.arange(12.0).view(3, 4), torch.ones(4, dtype=torch.bfloat16)
    second = SecondCopy()
    column, row = weight.t()[1], weight[2]
    second.view(column).fill_(-1)
    second.view(row).fill_(-2)
    assert torch.equal(weight, torch.arange(12.0).view(3, 4))
    assert second.nbytes == weight.nbytes, "of the storages that are written, each once"
    second.view(norm).zero_()
    second.install()
    assert weight.tolist() == [[0, -1, 2, 3], [4, -1, 6, 7], [-2, -2, -2, -2]]
    assert norm.tolist() == [0] * 4


class Receiver:
    """Receives a version, or fails, as soon as ``may_end`` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end, self._error = threading.Event(), error
        self.grad_enabled = True

    def fetch(self, patience: float) -> Received:
        assert self.may_end.wait(patience)
        self.grad_enabled = torch.is_grad_enabled()
        if self._error:
            raise self._error
        return RECEIVED


@pytest.mark.parametrize("error", [None, RuntimeError("no memory")])
def test_a_fetch_runs_beside_its_caller(error: Exception | None) -> None:
    receiver: Any = Receiver(error)
    fetch = BackgroundFetch(receiver, "7", 10, torch.device("cpu"))
    assert not fetch.result.done() and fetch.problem() == ""
    receiver.may_end.set()
    assert fetch.result.exception(10) is error
    assert fetch.problem() == ("no memory" if error else "")
    assert not receiver.grad_enabled
