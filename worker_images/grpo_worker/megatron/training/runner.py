"""Execution of micro-batches with Megatron-Core's pipeline schedules, on every parallel axis."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.common.context_spans import ContextSplit, padded_size, token_multiple
from grpo_worker.common.ragged_batch import RaggedBatch, offsets_of
from grpo_worker.data.balance import within_budget
from grpo_worker.data.micro_batch import MicroBatch, MicroBatches, Shape, groups_for, split
from grpo_worker.megatron.model.activation_offload import activations_offloaded
from grpo_worker.megatron.model.build import device
from grpo_worker.megatron.model.overlap import hand_mask
from grpo_worker.megatron.optim.optimizer import Trainable
from grpo_worker.megatron.training.gradient_check import GradientCheck
from grpo_worker.megatron.training.reductions import summed
from grpo_worker.profiling.progress import PROGRESS

# (output of this CP rank, such as logits [b, s, vocab / tp]; its micro-batch) -> loss of the micro-batch
LossFunction = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
# (output of this CP rank, its micro-batch, width) -> [rows, width]
RowFunction = Callable[[torch.Tensor, MicroBatch, int], torch.Tensor]
# (output of this CP rank, its micro-batch, width) -> (loss, figures)
UpdateFunction = Callable[[torch.Tensor, MicroBatch, int], tuple[torch.Tensor, torch.Tensor]]
# (model chunk, micro-batch) -> context that is open during the chunk's forward pass
ForwardContext = Callable[[Any, MicroBatch], AbstractContextManager[None]]


def no_context(_model: Any, _micro: MicroBatch) -> AbstractContextManager[None]:
    """Return an empty context."""
    return nullcontext()


FP8_TOKENS = 16  # products in FP8 take a multiple of these tokens


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Size of a micro-batch: ``rows`` padded to the batch's width, or packed up to ``max_tokens``.

    ``multiple``: what the number of tokens on each rank is a multiple of. ``log_prob_rows``,
    ``log_prob_max_tokens``: sizes of passes without gradients; None: the same.
    """

    rows: int = 1
    max_tokens: int | None = None
    multiple: int = 1
    log_prob_rows: int | None = None
    log_prob_max_tokens: int | None = None

    def without_gradients(self) -> "MicroBatching":
        """Return the sizes of passes without gradients."""
        rows, max_tokens = self.log_prob_rows or self.rows, self.log_prob_max_tokens or self.max_tokens
        return replace(self, rows=rows, max_tokens=max_tokens)


class Runner:
    """Runs the model chunks of one rank over the micro-batches of its rows."""

    def __init__(self, layout: Layout, batching: MicroBatching) -> None:
        self.layout = layout
        self._batching = batching
        self._multiple = token_multiple(layout.tensor, layout.context) * batching.multiple

    def micro_batches(self, batch: RaggedBatch, gradients: bool = True) -> MicroBatches:
        """Split the rank's rows into micro-batches, equally many on every data-parallel rank. Collective.

        ``gradients``: their passes keep activations. Raises ValueError for a sequence that does not fit.
        """
        context, lengths = self._context_split(batch.width), batch.lengths.tolist()
        sizes = self._batching if gradients else self._batching.without_gradients()
        if sizes.max_tokens is None:
            return split(batch, Shape(sizes.rows, self._multiple), device(), context=context)
        own = not gradients and self._batching.log_prob_max_tokens
        field = "logProbMaxTokensPerGpu" if own else "maxTokensPerGpu"
        groups = within_budget(lengths, sizes.max_tokens, self.layout.context, field)
        count = self._agreed_count(len(groups))
        return split(batch, Shape(None, self._multiple), device(), groups_for(lengths, count), context)

    @property
    def packs(self) -> bool:
        """Whether micro-batches are packed."""
        return self._batching.max_tokens is not None

    def context_spans(self, width: int, length: int) -> list[tuple[int, int]]:
        """Return the tokens (first, end) of a row that this context-parallel rank computes.

        ``width``: of the batch; ``length``: of the row.
        """
        split = self._context_split(width)
        if split is None:
            return [(0, width)]
        return [(first, end) for first, end in split.spans([length])[0].tolist()]

    def _context_split(self, width: int) -> ContextSplit | None:
        if self.layout.context == 1:
            return None
        rank = parallel_state.get_context_parallel_rank()
        whole = None if self.packs else padded_size(width, self._multiple)
        return ContextSplit(self.layout.tensor, self.layout.context, rank, whole)

    def _agreed_count(self, count: int) -> int:
        """Return the largest count of all data-parallel ranks, as a multiple of the pipeline's rounds."""
        largest = torch.tensor(count, device=device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        # The interleaved schedule runs micro-batches in rounds of one per stage.
        pipeline = self.layout.pipeline if self.layout.virtual_pipeline > 1 else 1
        return -(-int(largest) // pipeline) * pipeline

    def rows(
        self,
        chunks: Sequence[Any],
        batch: RaggedBatch,
        functions: Mapping[str, RowFunction],
        context: ForwardContext = no_context,
    ) -> dict[str, np.ndarray]:
        """Apply ``functions`` to the outputs of forward passes without gradients.

        Returns a column with an entry for each token, in the batch's order, of each; an empty dict outside
        the last pipeline stage. Tokens whose outputs another context-parallel rank computes are 0.
        """
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in functions}
        order: list[int] = []

        def collect(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            for name, function in functions.items():
                rows = function(output, micro, batch.width)
                # Without the padding; on the device until the end, because each copy would stall a GPU.
                columns[name] += [row[:length] for row, length in zip(rows, micro.lengths, strict=True)]
            order.extend(micro.indices)
            return output.new_zeros(())

        with torch.no_grad():
            self.run(chunks, self.micro_batches(batch, gradients=False), collect, True, context)
        if not order:
            return {}
        return {name: _in_order(parts, order, batch) for name, parts in columns.items()}

    def update(
        self,
        trainable: Trainable,
        batch: RaggedBatch,
        function: UpdateFunction,
        names: Sequence[str],
        context: ForwardContext = no_context,
        check: GradientCheck | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on this data-parallel rank's rows. Collective.

        ``function`` returns the loss of a micro-batch and, detached, its figures ``names``; both are sums
        over this rank's tokens, weighted as in the global mini-batch. Returns the figures of the global
        mini-batch, grad_norm and lr. ``check``: compute the gradients twice; raises GradientMismatchError.
        """
        trainable.begin()
        micro = self.micro_batches(batch)
        # Undoes two averages: the schedule's over micro-batches and DDP's over data-parallel ranks.
        scale = len(micro) * self.layout.data
        sums: list[torch.Tensor] = []

        def losses(output: torch.Tensor, part: MicroBatch) -> torch.Tensor:
            loss, figures = function(output, part, batch.width)
            sums.append(figures)
            return loss * scale

        if check is not None:
            with check.first_passes():
                self.run(trainable.ddp, micro, losses, False, context)
            sums.clear()
        self.run(trainable.ddp, micro, losses, False, context)
        if check is not None:
            check.compare()
        return summed(sums, names) | trainable.step()

    def run(
        self,
        chunks: Sequence[Any],
        micro: MicroBatches,
        loss_function: LossFunction,
        forward_only: bool,
        context: ForwardContext = no_context,
    ) -> None:
        """Run the forward (and backward) passes of all micro-batches.

        On the last stage ``loss_function`` computes the loss of each micro-batch from the model's output.
        ``context`` is open during each forward pass.
        """
        opened = ExitStack()

        def forward(
            data: Iterator[MicroBatch], model: Any, return_schedule_plan: bool = False
        ) -> tuple[Any, Any]:
            part = next(data)

            def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
                if return_schedule_plan:
                    logits.register_hook(_count_backward)  # type: ignore[no-untyped-call]
                return loss_function(logits, part), {}

            if return_schedule_plan:
                # Its forward pass runs between this call and the next one.
                opened.close()
                opened.enter_context(context(model, part))
                PROGRESS.add("forward passes")
                return _forward(model, part, plan=True), loss
            with context(model, part):
                output = _forward(model, part)
            PROGRESS.add("forward passes")
            if output.requires_grad and not forward_only:
                output.register_hook(_count_backward)
            return output, loss

        # The schedule takes one iterator for each model chunk.
        data = [iter(micro) for _ in chunks]
        with activations_offloaded(chunks, forward_only), opened:
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=data if len(chunks) > 1 else data[0],
                model=list(chunks) if len(chunks) > 1 else chunks[0],
                num_microbatches=len(micro),
                seq_length=micro.size[1],
                micro_batch_size=micro.size[0],
                forward_only=forward_only,
            )


def _count_backward(_gradient: torch.Tensor) -> None:
    """Count a backward pass when it starts; the schedules offer no other place."""
    PROGRESS.add("backward passes")


def _in_order(parts: list[torch.Tensor], order: list[int], batch: RaggedBatch) -> np.ndarray:
    """Return the parts of rows ``order`` as one column on the host, in the batch's order."""
    column = torch.cat(parts).float().cpu().numpy()
    starts = offsets_of(batch.lengths[order])
    places = np.argsort(order)
    return np.concatenate([column[starts[i] : starts[i + 1]] for i in places])


def _forward(model: Any, micro: MicroBatch, plan: bool = False) -> Any:
    """Return the output of a model chunk, or with ``plan`` Megatron-Core's schedule plan of its passes."""
    chunk = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    ids, positions = context_slice(micro, micro.input_ids), context_slice(micro, micro.position_ids)
    if plan:
        hand_mask(chunk, router_slice(micro, micro.padding()))
    return (chunk.build_schedule_plan if plan else model)(
        ids,
        positions,
        None,
        packed_seq_params=packed_params(micro, chunk.config.apply_rope_fusion),
        padding_mask=_padding_mask(chunk, micro),
    )


def _padding_mask(chunk: Any, micro: MicroBatch) -> torch.Tensor | None:
    """Return the padding that the routers of a model chunk must ignore, bool; None for dense models.

    The first chunk takes [b, s / cp] and splits it over TP ranks together with the embeddings. A later one
    hands the mask on to its layers as it is, so that it must already be split like its hidden states.
    """
    if chunk.config.num_moe_experts is None:
        return None
    return (context_slice if chunk.pre_process else router_slice)(micro, micro.padding())


def packed_params(micro: MicroBatch, on_device: bool = False) -> PackedSeqParams | None:
    """Return the bounds of the sequences in a packed micro-batch, or None when it is padded.

    ``on_device``: fused kernels read the bounds there. Otherwise Megatron-Core reads them on the host in
    every layer, and each read of a GPU would stall it.
    """
    if not micro.bounds:
        return None
    bounds = torch.tensor(micro.bounds, dtype=torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    if on_device:
        bounds = bounds.to(device(), non_blocking=True)
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)


def context_slice(micro: MicroBatch, tokens: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's part of [b, s, ...]: [b, s / cp, ...]."""
    return tokens if micro.own is None else tokens.index_select(1, micro.own)


def router_slice(micro: MicroBatch, tokens: torch.Tensor) -> torch.Tensor:
    """Return the part of [b, s] whose tokens this rank's routers see: [b, s / (tp x cp)]."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    # Sequence parallelism is on if TP is.
    own: torch.Tensor = context_slice(micro, tokens).chunk(size, dim=1)[rank]
    return own
