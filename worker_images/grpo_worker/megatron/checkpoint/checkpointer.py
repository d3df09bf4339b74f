"""Distributed checkpoints with Megatron-Core's dist_checkpointing, written while training continues."""

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.optimizer import distrib_optimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from grpo_worker.checkpointing.checked_reads import OBJECT_FILES, check_reads
from grpo_worker.checkpointing.object_files import ObjectFiles
from grpo_worker.checkpointing.store import (
    CONTROLLER_STATE,
    DamagedCheckpointError,
    Origin,
    commit,
    directory,
    prune,
    state_folder,
    verify,
)
from grpo_worker.common.store_path import StorePath, patiently
from grpo_worker.common.store_problems import UnwritableStoreError, errno_of
from grpo_worker.megatron.checkpoint.common_state import write_common_state
from grpo_worker.megatron.checkpoint.draft import Draft, small_files
from grpo_worker.megatron.checkpoint.host_pool import POOL, Block
from grpo_worker.megatron.checkpoint.owned_state import save_own_parameters
from grpo_worker.megatron.checkpoint.part import CheckpointPart, all_on_device
from grpo_worker.megatron.checkpoint.patches import (
    count_writes,
    share_storages,
    write_in_threads,
)
from grpo_worker.megatron.checkpoint.save_plan import SavePlan
from grpo_worker.megatron.checkpoint.writer import WriterQueue
from grpo_worker.megatron.host_sync.barrier import store_barrier
from grpo_worker.megatron.optim import adam
from grpo_worker.megatron.optim.optimizer import inner_optimizers
from grpo_worker.megatron.versions import OWN_WRITERS
from grpo_worker.profiling.background import join

save_own_parameters(distrib_optimizer)
write_in_threads(filesystem_async)
share_storages(torch_strategy)
count_writes(filesystem_async)
check_reads(FileSystemReader)  # Megatron-Core's own are derived from it

_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class Checkpointer:
    """Saving and loading of a rank's parts. Every method is collective: call it on all ranks."""

    def __init__(
        self, root: "str | StorePath", parts: Sequence[CheckpointPart], keep: int, origin: Origin
    ) -> None:
        self.root = Path(root) if isinstance(root, str) else root
        self._parts = parts
        self._origin = origin
        self._keep = keep
        self._plan = SavePlan()
        self._queue = WriterQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._commits: deque[Future[int]] = deque()  # on rank 0

    def save(
        self, step: int, controller_state: dict[str, Any], from_host: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Copy the state and start to write it; training may continue when this returns.

        Nothing is read from the store or written to it before that. ``from_host``: offloaded state is read in
        host memory, because engines may hold the GPUs. ``first``: writes other files of this rank into the
        checkpoint's folder, in the writer's thread and before the state. It must not raise.
        """
        draft, blocks = Draft(), list[Block]()
        with all_on_device(() if from_host else self._parts):
            state = self._state_in_host_memory() if from_host else self._state(loading=False)
            request = dist_checkpointing.save(
                dict(state),
                str(draft.path),
                self._plan.strategy,
                validate_access_integrity=not self._plan.settled,
                async_sharded_save=True,
                content_metadata=_CONTENT,
                **OWN_WRITERS,
            )
            self._plan.settle()
            request.add_finalize_fn(lambda: self._written(step, draft))
            request.add_finalize_fn(lambda: POOL.give_back(blocks))
            if dist.get_rank() == 0:
                write_common_state(state, draft.path)
                (draft.path / CONTROLLER_STATE).write_text(json.dumps(controller_state))
            self._queue.write(request, self.directory(step), first)
            blocks.extend(POOL.end())

    def directory(self, step: int) -> StorePath:
        """Return the directory of the checkpoint that these ranks save after ``step``."""
        return directory(self.root, step, self._origin.attempt)

    def poll(self, blocking: bool = False) -> list[int]:
        """Start to commit the checkpoints that all ranks have written.

        Returns the steps of those that became complete, on rank 0; other ranks return none. ``blocking``:
        wait until all are complete. Raises UnwritableStoreError on all ranks when any of them cannot write.
        """
        try:
            self._queue.maybe_finalize_async_calls(blocking=blocking)
        except CheckpointException as error:  # it is no Exception, so it would end the process
            raise self._unwritten(error) from None
        finished = []
        while self._commits and (blocking or self._commits[0].done()):
            finished.append(join(self._commits.popleft()))
        if blocking:
            store_barrier(range(dist.get_world_size())).wait()
        return finished

    def _unwritten(self, error: CheckpointException) -> UnwritableStoreError:
        """Return what any rank could not write, with the system's number. Collective."""
        mine = self._queue.problem
        own = None if mine is None else (f"{type(mine).__name__}: {mine}", errno_of(mine))
        problems: list[tuple[str, int] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, own)
        found = [(rank, *problem) for rank, problem in enumerate(problems) if problem is not None]
        rank, text, number = found[0] if found else (0, str(error), 0)
        return UnwritableStoreError(
            f"checkpoint.store: rank {rank} cannot write a checkpoint below {self.root}: {text}", number
        )

    def _written(self, step: int, draft: Draft) -> None:
        if dist.get_rank() == 0:
            self._commits.append(self._thread.submit(self._commit, step, draft))
        else:
            draft.remove()

    def _commit(self, step: int, draft: Draft) -> int:
        """Complete the checkpoint and remove old ones, in a thread of rank 0."""

        def complete() -> None:
            draft.publish(self.directory(step))
            commit(self.root, step, self._origin)
            prune(self.root, self._keep, self._origin.attempt)

        if isinstance(self.root, Path):
            complete()
        else:
            patiently(complete, f"completing {self.directory(step)}")
        draft.remove()
        return step

    def load(self, path: StorePath) -> None:
        """Restore models, optimizers and schedules; in the same layout also the random generators.

        Of a checkpoint of another job, from which this one begins with the weights alone, restore those of
        the policy.

        Raises DamagedCheckpointError on all ranks when it is truncated or any of them reads changed values,
        and ValueError when it is incomplete, of another model or too new.
        """
        with all_on_device(self._parts):
            self._load(path)

    def _load(self, path: StorePath) -> None:
        origin = verify(path, self._origin.model)
        if origin.policy_only:
            self._load_weights(path)
            return
        same_layout = origin.layout == self._origin.layout
        for part in self._parts:
            if part.trainable is not None:
                for inner in inner_optimizers(part.trainable.optimizer):
                    adam.initialize(inner)
        template = self._state(loading=True)
        if not same_layout:
            template.pop("rng")  # one state per rank of the old layout; training draws nothing from it
        state = _loaded(template, path)
        for part in self._parts:
            part.restore(state[part.prefix or "policy."])
        if same_layout:
            restore_rng(state["rng"][0])

    def _load_weights(self, path: StorePath) -> None:
        """Restore the policy's weights; its optimizer begins with them."""
        (policy,) = (part for part in self._parts if not part.prefix)
        policy.restore_weights(_loaded(policy.weights(_metadata()), path))
        if policy.trainable is not None:
            policy.trainable.optimizer.reload_model_params()

    def _state(self, loading: bool) -> dict[str, Any]:
        metadata = _metadata()
        state = {part.prefix or "policy.": part.state(loading, metadata) for part in self._parts}
        return state | {"rng": _rng_object()}

    def _state_in_host_memory(self) -> dict[str, Any]:
        metadata = _metadata()
        state = {part.prefix or "policy.": part.state_in_host_memory(metadata) for part in self._parts}
        return state | {"rng": _rng_object()}


def _loaded(template: dict[str, Any], path: StorePath) -> dict[str, Any]:
    """Load a template. Raises what went wrong on any rank, on all of them."""
    state, failure = dict[str, Any](), None
    try:
        with _readable(path) as folder:
            state = dist_checkpointing.load(template, str(folder))
    except CheckpointException as error:  # it is no Exception, so it would end the process
        failure = _cause(error)
    # Megatron-Core 0.16.1 tells all ranks; in later versions each loads by itself.
    failures: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for other in sorted(filter(None, failures), key=lambda e: not isinstance(e, DamagedCheckpointError)):
        raise other
    return state


@contextmanager
def _readable(path: StorePath) -> Iterator[Path]:
    """Keep a folder in which a reader finds the checkpoint while the context is open."""
    if isinstance(path, Path):
        yield path
        return
    draft = small_files(state_folder(path))
    OBJECT_FILES[str(draft.path)] = ObjectFiles(path)
    try:
        yield draft.path
    finally:
        del OBJECT_FILES[str(draft.path)]
        draft.remove()


def _cause(error: CheckpointException) -> Exception:
    """Return that the checkpoint is damaged, if that is among the causes, or all of them as one error."""
    causes = (cause for cause, _ in error.failures.values() if isinstance(cause, DamagedCheckpointError))
    return next(causes, RuntimeError(str(error)))


def _metadata() -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return _CONTENT | {"dp_cp_group": group}


def _rng_object() -> ShardedObject:
    """Return this rank's random generators as one of ``world size`` checkpoint objects."""
    return ShardedObject("rng", [rng_state()], (dist.get_world_size(),), (dist.get_rank(),))


def rng_state() -> dict[str, Any]:
    """Return the state of this rank's random generators."""
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore this rank's random generators."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
