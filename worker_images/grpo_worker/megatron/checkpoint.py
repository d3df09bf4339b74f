"""Distributed checkpoints with megatron-core's dist_checkpointing: written behind the training."""

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
)

from grpo_worker.data.checkpoints import CONTROLLER_STATE, commit, directory, prune, verify
from grpo_worker.megatron.model import PolicyModel

_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class _ThreadCaller(AsyncCaller):  # type: ignore[misc]
    """Runs the write in a thread of this process; forking a Ray actor is not safe."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        if async_req.async_fn is None:
            return
        args = list(async_req.async_fn_args)
        if async_req.preload_fn:
            args[1] = async_req.preload_fn()
        self._thread = threading.Thread(
            target=async_req.async_fn, args=args, kwargs=async_req.async_fn_kwargs
        )
        self._thread.start()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        if blocking and self._thread:
            self._thread.join()
        alive = int(self._thread is not None and self._thread.is_alive())
        return bool(not alive if no_dist else self.sync_all_async_calls(alive))

    def close(self, abort: bool = False) -> None:
        if self._thread and not abort:
            self._thread.join()

    def __del__(self) -> None:
        pass


class _ThreadQueue(AsyncCallsQueue):  # type: ignore[misc]
    def _get_async_caller(self) -> AsyncCaller:
        return _ThreadCaller()


class Checkpointer:
    """Saves and loads one PolicyModel. Every method is collective: call it on all ranks."""

    def __init__(self, root: str, policy: PolicyModel, keep: int) -> None:
        self.root = Path(root)
        self._policy = policy
        self._keep = keep
        self._queue = _ThreadQueue()
        self._pending: list[int] = []

    def save(self, step: int, controller_state: dict[str, Any]) -> None:
        """Start writing; training may go on at once (the state is copied first)."""
        path = directory(self.root, step)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # left by an attempt that died
            path.mkdir(parents=True)
            (path / CONTROLLER_STATE).write_text(json.dumps(controller_state))
        dist.barrier()
        request = dist_checkpointing.save(
            self._state(loading=False),
            str(path),
            get_default_save_sharded_strategy("torch_dist"),
            async_sharded_save=True,
            content_metadata=_CONTENT,
        )
        request.add_finalize_fn(lambda: self._commit(step))
        self._queue.schedule_async_request(request)
        self._pending.append(step)

    def poll(self, blocking: bool = False) -> list[int]:
        """Commit the checkpoints whose files are written on all ranks; return their steps."""
        done = self._queue.maybe_finalize_async_calls(blocking=blocking)
        finished, self._pending = self._pending[: len(done)], self._pending[len(done) :]
        return finished

    def _commit(self, step: int) -> None:
        dist.barrier()
        if dist.get_rank() != 0:
            return
        commit(self.root, step)
        prune(self.root, self._keep)

    def load(self, step: int) -> None:
        """Restore model, optimizer, schedule and this rank's generators.

        Raises ValueError when a file is missing or has another size than the marker says.
        """
        path = directory(self.root, step)
        verify(self.root, step)
        for inner in _inner_optimizers(self._policy.optimizer):
            _init_adam_state(inner)
        state = dist_checkpointing.load(self._state(loading=True), str(path))
        self._policy.module.load_state_dict(state["model"], strict=True)
        with torch.no_grad():
            self._policy.optimizer.load_state_dict(state["optimizer"])
        for inner in _inner_optimizers(self._policy.optimizer):
            _unshare_adam_step(inner)
        self._policy.schedule.load_state_dict(state["schedule"])
        _restore_rng(state["rng"][0])

    def _state(self, loading: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = dict(_CONTENT)
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state: dict[str, Any] = {"model": self._policy.module.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self._policy.optimizer.sharded_state_dict(
            dict(state), is_loading=loading, metadata=metadata
        )
        state["schedule"] = self._policy.schedule.state_dict()
        state["rng"] = _rng_object()
        return state


def _rng_object() -> ShardedObject:
    """Every rank's generators; one object per rank, whatever the layout."""
    state = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", [state], (dist.get_world_size(),), (dist.get_rank(),))


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o.optimizer for o in chained if getattr(o, "optimizer", None) is not None]


def _init_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Megatron builds the load template from Adam's state, which is empty before a step."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(param),
                    exp_avg_sq=torch.zeros_like(param),
                )


def _unshare_adam_step(optimizer: torch.optim.Optimizer) -> None:
    """Megatron hands every parameter the same step tensor; Adam would add 1 per parameter."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].detach().clone()
