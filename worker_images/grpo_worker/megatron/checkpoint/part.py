"""Part of a checkpoint: the state of one model, read from the device or from host memory."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.megatron.checkpoint import host_state, owned_state
from grpo_worker.megatron.checkpoint.reshard import adapted
from grpo_worker.megatron.optim import adam
from grpo_worker.megatron.optim.offload import HostCopies, Offloadable
from grpo_worker.megatron.optim.optimizer import Trainable, inner_optimizers

_EXTRA = "_extra_state"  # of a module's state that is not a tensor


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """State of one model in a checkpoint.

    ``prefix``: of its tensors' names, "" for the policy. ``trainable``: optimizer and schedule of a model
    that is trained. ``frozen``: offload of the weights of a model that is not trained.
    """

    prefix: str
    chunks: Sequence[Any]
    trainable: Trainable | None = None
    frozen: Offloadable | None = None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the whole state on the device while the context is open."""
        with ExitStack() as stack:
            if self.trainable is not None:
                stack.enter_context(self.trainable.on_device())
            if self.frozen is not None:
                stack.enter_context(self.frozen.on_device())
            yield

    def named_chunks(self) -> list[tuple[str, Any]]:
        """Return the chunks under the names that Megatron-Core's optimizer expects.

        These are model for a single chunk, otherwise model0, model1, ...
        """
        if len(self.chunks) == 1:
            return [("model", self.chunks[0])]
        return [(f"model{number}", chunk) for number, chunk in enumerate(self.chunks)]

    def state(self, loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the state to save, or with ``loading`` the template of the state to load."""
        state = self.weights(metadata)
        if self.trainable is not None:
            adam.share_step(inner_optimizers(self.trainable.optimizer))
            state["optimizer"] = self.trainable.optimizer.sharded_state_dict(
                dict(state), is_loading=loading, metadata=metadata
            )
            state["schedule"] = self.trainable.schedule.state_dict()
        return state

    def weights(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the weights to save, or the template of those to load."""
        return {
            name: _weights(chunk.sharded_state_dict(prefix=self.prefix, metadata=metadata))
            for name, chunk in self.named_chunks()
        }

    def state_in_host_memory(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the state to save like ``state``, with the host's copies of what is offloaded."""
        copies = HostCopies({})
        if self.trainable is not None:
            copies = self.trainable.host_copies()
        if self.frozen is not None:
            copies |= self.frozen.host_copies()
        state = self.state(False, metadata | owned_state.from_host(copies))
        host_state.replace_tensors(state, copies)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the model from a loaded template."""
        self.restore_weights(state)
        if self.trainable is None:
            return
        with torch.no_grad():
            optimizer = self.trainable.optimizer
            optimizer.load_state_dict(adapted(state["optimizer"], optimizer))
        for inner in inner_optimizers(self.trainable.optimizer):
            adam.unshare_step(inner)
        self.trainable.restore_schedule(state["schedule"])

    def restore_weights(self, state: dict[str, Any]) -> None:
        """Restore the weights from a loaded template."""
        for name, chunk in self.named_chunks():
            weights = {key.removeprefix(self.prefix): value for key, value in state[name].items()}
            found = chunk.load_state_dict(weights, strict=False)
            missing = [key for key in found.missing_keys if not key.endswith(_EXTRA)]
            if missing or found.unexpected_keys:
                raise ValueError(f"the checkpoint lacks {missing}, or has {found.unexpected_keys} besides")


def _weights(state: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state without that of Transformer Engine's modules, which is empty without FP8.

    So a checkpoint does not depend on the kernels that wrote it.
    """
    return {key: value for key, value in state.items() if not key.rstrip("0123456789").endswith(_EXTRA)}


@contextmanager
def all_on_device(parts: Sequence[CheckpointPart]) -> Iterator[None]:
    """Keep all parts on the device while the context is open."""
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.on_device())
        yield
