"""Megatron-Core's distributed Adam and its learning-rate schedule, from the job's fields."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from pydantic.alias_generators import to_camel

from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtype, OptimizerDtypes
from grpo_worker.megatron.optim import precision_aware
from grpo_worker.megatron.optim.data_parallel import DataParallel, GradientBucket
from grpo_worker.megatron.optim.offload import HostCopies, Offloadable
from grpo_worker.profiling.progress import PROGRESS


class Trainable:
    """Model chunks with their gradient buffers, optimizer and learning-rate schedule.

    ``updates``: optimizer steps of the whole job, in which the learning rate decays.
    ``offload``: which of these are on the device only while they are used. ``weights``: offload of the
    chunks' weights. Raises ValueError for dtypes that the optimizer does not have here.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        spec: OptimizerSpec,
        updates: int,
        offload: OffloadSpec,
        dtypes: OptimizerDtypes,
    ) -> None:
        self.chunks = list(chunks)
        config = self.chunks[0].config
        optimizer_config = _optimizer_config(spec, config.params_dtype, dtypes)
        self._parallel = DataParallel(self.chunks, dtypes.main_grads_dtype is OptimizerDtype.FP32)
        self.ddp = self._parallel.wrapped
        self.optimizer = get_megatron_optimizer(optimizer_config, self.ddp)
        for inner in inner_optimizers(self.optimizer):
            precision_aware.prepare(inner)
        config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = schedule_of(self.optimizer, spec, updates)
        buffers = self._parallel.buffers
        self.weights = Offloadable(
            lambda: (b.param_data for b in buffers()),
            offload.parameters,
            finish=self._parallel.finish_gather,
        )
        self._gradients = Offloadable(lambda: (b.grad_data for b in buffers()), offload.gradients, kept=False)
        self._state = Offloadable(self._optimizer_state, offload.optimizer)
        for part in (self.weights, self._gradients, self._state):
            part.release()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep weights and optimizer state on the device while the context is open."""
        with ExitStack() as stack:
            for part in (self.weights, self._state):
                stack.enter_context(part.on_device())
            yield

    def host_copies(self) -> HostCopies:
        """Return the copies in host memory of the weights and the optimizer state, where offloaded."""
        return self.weights.host_copies() | self._state.host_copies()

    def begin(self) -> None:
        """Prepare the backward passes of an optimizer step: zero the gradients."""
        self.weights.acquire(finished=False)
        self._gradients.acquire()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Prepare for backward passes whose gradients replace those of other ones."""
        self._parallel.begin()
        self.optimizer.zero_grad()

    def gradient_buckets(self) -> Iterator[GradientBucket]:
        """Return the buckets of the gradients, which are on the device between ``begin`` and ``step``."""
        return self._parallel.gradient_buckets()

    def step(self) -> dict[str, float]:
        """Update the weights; return the gradient norm and the learning rate of this step."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        with self._state.on_device():
            PROGRESS.add("optimizer steps begun")
            _, grad_norm, _ = self.optimizer.step()
            self._parallel.start_gather()
        PROGRESS.add("optimizer steps")
        self.schedule.step(increment=1)
        self._gradients.release()
        self.weights.release()
        return {"grad_norm": float(grad_norm), "lr": lr}

    def decay_over(self, updates: int) -> None:
        """Change the number of optimizer steps of the whole job, from the next one on."""
        schedule = self.schedule
        schedule.lr_decay_steps = _decay_steps(updates, schedule.lr_warmup_steps)
        schedule.wd_incr_steps = updates
        schedule.step(increment=0)

    def restore_schedule(self, state: dict[str, Any]) -> None:
        """Go on after the steps of a saved schedule; rates, styles and lengths are those of this job.

        ``totalSteps`` may have been raised, and a job that starts from another's checkpoint has its own.
        """
        self.schedule.num_steps = 0  # loading adds the saved number
        self.schedule.load_state_dict(state)

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        """Return the moments, and the main weights, or their remainders, where they are separate tensors."""
        for optimizer in chained_optimizers(self.optimizer):
            for group in getattr(optimizer, "shard_fp32_from_float16_groups", []):
                yield from (shard for shard in group if shard is not None)
        for inner in inner_optimizers(self.optimizer):
            for state in inner.state.values():
                names = (*precision_aware.MOMENTS, precision_aware.MAIN)
                yield from (state[name] for name in names if name in state)


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers inside Megatron-Core's."""
    return [o.optimizer for o in chained_optimizers(optimizer) if getattr(o, "optimizer", None) is not None]


def chained_optimizers(optimizer: Any) -> Sequence[Any]:
    """Return Megatron-Core's optimizers of the parts of a model."""
    parts: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def frozen_weights(chunks: Sequence[Any], offload: OffloadSpec) -> Offloadable:
    """Return the weights of chunks that are not trained, already offloaded."""
    weights = Offloadable(lambda: (p for chunk in chunks for p in chunk.parameters()), offload.parameters)
    weights.release()
    return weights


_TORCH = {OptimizerDtype.FP32: torch.float32, OptimizerDtype.BF16: torch.bfloat16}


def _optimizer_config(spec: OptimizerSpec, dtype: torch.dtype, dtypes: OptimizerDtypes) -> OptimizerConfig:
    precisions: dict[str, Any] = {}
    for name, narrow in dtypes.narrow.items():
        if not distrib_optimizer.USING_TE_OPTIMIZER:
            raise ValueError(
                f"spec.trainer.precisionAwareOptimizer.{to_camel(name)}={narrow} needs Transformer Engine's "
                "FusedAdam: use an image that has it, or set it to fp32"
            )
        precisions |= {"use_precision_aware_optimizer": True, name: _TORCH[narrow]}
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.adam_beta1,
        adam_beta2=spec.adam_beta2,
        clip_grad=spec.clip_grad,
        use_distributed_optimizer=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **precisions,
    )


def _decay_steps(updates: int, warmup: int) -> int:
    return max(updates, warmup + 1)


def schedule_of(optimizer: Any, spec: OptimizerSpec, updates: int) -> OptimizerParamScheduler:
    """Return the schedule of the learning rate over ``updates`` optimizer steps."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=spec.lr,
        min_lr=spec.min_lr,
        lr_warmup_steps=spec.lr_warmup_steps,
        lr_decay_steps=_decay_steps(updates, spec.lr_warmup_steps),
        lr_decay_style=spec.lr_decay_style,
        start_wd=spec.weight_decay,
        end_wd=spec.weight_decay,
        wd_incr_steps=updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
