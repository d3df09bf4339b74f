"""A graph repeats what a model computes after a load only if it writes the same bytes."""

import torch

from grpo_worker.weightsync.sglang_plugin.post_load import PostLoad, reproduces, written


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
        self.turned = torch.zeros(3, 2).t()
        self.cache = torch.ones(4)


class Model(torch.nn.Module):
    """Keeps a transposed copy of its weights, as DeepSeek-V3's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Layer(), Layer()]
        self.layers = torch.nn.ModuleList(self.parts)
        self.calls: list[float] = []

    def post_load_weights(self, factor: float = 1.0) -> None:
        self.calls.append(factor)
        for layer in self.parts:
            layer.turned.copy_(factor * layer.weight)


def test_the_tensors_that_a_call_writes_are_found() -> None:
    model = Model()
    found = written(model, model.post_load_weights)
    assert [id(tensor) for tensor in found] == [id(layer.turned) for layer in model.parts]
    assert torch.equal(model.parts[1].turned, model.parts[1].weight)


def test_a_replay_that_writes_the_same_bytes_is_accepted() -> None:
    model = Model()
    outputs = written(model, model.post_load_weights)
    assert reproduces(model.post_load_weights, outputs)
    assert torch.equal(model.parts[0].turned, model.parts[0].weight)


def test_a_replay_that_writes_nothing_or_other_bytes_is_refused() -> None:
    model = Model()
    outputs = written(model, model.post_load_weights)
    assert not reproduces(lambda: None, outputs)
    model.post_load_weights()
    assert not reproduces(lambda: model.post_load_weights(1.0 + 2**-20), outputs)


def test_without_a_gpu_every_load_makes_the_calls() -> None:
    model = Model()
    post_load = PostLoad(model, [((), {}), ((), {"factor": 2.0})])
    post_load.capture(torch.device("cpu"))
    assert not model.calls
    post_load.run()
    assert model.calls == [1.0, 2.0]
