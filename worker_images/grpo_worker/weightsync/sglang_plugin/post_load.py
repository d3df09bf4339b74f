"""Post-load: repeats what a model computes from its parameters after a load, on a GPU as one CUDA graph."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

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
        """Record the kernels for a GPU, once; the calls must have been made before.

        A model that waits for the GPU, for example to read a number, cannot be recorded: its calls are made
        for each load.
        """
        if self._tried or device.type != "cuda" or not self._calls:
            return
        self._tried = True
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        try:
            # Other threads of the engine may use the GPU meanwhile.
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._call()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            log.info("post_load_weights cannot be recorded as a graph: %s", error)
            return
        self._graph = graph

    def run(self) -> None:
        """Make all calls."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._call()

    def _call(self) -> None:
        for args, kwargs in self._calls:
            self._model.post_load_weights(*args, **kwargs)
