"""Post-load: repeats what a model computes from its parameters after a load, on a GPU as one CUDA graph."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from grpo_worker.weightsync.protocol.fingerprint import fingerprint

log = logging.getLogger(__name__)

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call of post_load_weights


class PostLoad:
    """Recorded ``calls`` of ``post_load_weights`` of a model, which write to the same places at each load.

    Launching their kernels one by one takes half a millisecond for each layer of DeepSeek-V3, while the
    engine is paused; a graph of all of them is launched at once. It keeps the memory for intermediate
    results, which is that of one layer.
    """

    def __init__(self, model: Any, calls: Sequence[Call]) -> None:
        self._model = model
        self._calls = calls
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tried = False

    def capture(self, device: torch.device) -> None:
        """Record the kernels for a GPU, once, and compare what they write with what the calls write.

        The calls are made for each load if the model waits for the GPU meanwhile, for example to read a
        number, or if nothing is found that they write.
        """
        if self._tried or device.type != "cuda" or not self._calls:
            return
        self._tried = True
        try:
            outputs = written(self._model, self._call)
            graph = _recorded(self._call, device) if outputs else None
            if graph is not None and reproduces(graph.replay, outputs):
                self._graph = graph
                return
        except RuntimeError as error:
            log.info("post_load_weights cannot be recorded as a graph: %s", error)
        self._call()

    def run(self) -> None:
        """Make all calls."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._call()

    def _call(self) -> None:
        for args, kwargs in self._calls:
            self._model.post_load_weights(*args, **kwargs)


def written(model: Any, call: Callable[[], None]) -> list[torch.Tensor]:
    """Make a call; return the tensors among the modules' plain attributes that it has written in place."""
    before = {id(tensor): tensor._version for tensor in _attributes(model)}
    call()
    return [t for t in _attributes(model) if id(t) in before and before[id(t)] != t._version]


def reproduces(replay: Callable[[], None], outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether ``replay`` writes to ``outputs`` the bytes that they hold now."""
    wanted = [_bytes(tensor) for tensor in outputs]
    for tensor in outputs:
        tensor.zero_()
    replay()
    return [_bytes(tensor) for tensor in outputs] == wanted


def _recorded(call: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph of the call's kernels. Raises RuntimeError if it does more than to launch them."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Other threads of the engine may use the GPU meanwhile.
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    return graph


def _attributes(model: Any) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    return int(fingerprint(tensor.contiguous().view(-1).view(torch.uint8)))
