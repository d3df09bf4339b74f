"""Micro-batches through Megatron-Core's pipeline schedules, on every parallel axis."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.data.balance import within_budget
from grpo_worker.data.micro_batch import Batch, MicroBatch, Shape, groups_for, lengths_of, split
from grpo_worker.megatron.model.build import device
from grpo_worker.megatron.model.core_attention import zigzag_chunks
from grpo_worker.megatron.optim.optimizer import Trainable
from grpo_worker.megatron.training.reductions import summed

# (logits [b, s, vocab / tp] of this CP rank, its micro-batch) -> loss of the micro-batch
OnLogits = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
# (output of this CP rank, its micro-batch, width) -> [rows, width]
OnRows = Callable[[torch.Tensor, MicroBatch, int], torch.Tensor]
# (output of this CP rank, its micro-batch, width) -> (loss, its figures)
OnOutput = Callable[[torch.Tensor, MicroBatch, int], tuple[torch.Tensor, torch.Tensor]]
# (model chunk, micro-batch) -> context
Around = Callable[[Any, MicroBatch], AbstractContextManager[None]]


def nothing_around(_model: Any, _micro: MicroBatch) -> AbstractContextManager[None]:
    """Nothing to hold open."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """``rows`` of one forward, padded to the batch's width; or, with ``max_tokens``, packed."""

    rows: int = 1
    max_tokens: int | None = None


class Runner:
    """Runs the model chunks of one rank over the micro-batches of its rows."""

    def __init__(self, layout: Layout, batching: MicroBatching) -> None:
        if batching.max_tokens and layout.context > 1:
            raise ValueError(
                f"trainer.maxTokensPerGpu with context={layout.context}: packed sequences cannot be cut over "
                "context-parallel ranks; remove maxTokensPerGpu or set context to 1"
            )
        self.layout = layout
        self._batching = batching
        # Context parallelism cuts a sequence into 2 x cp chunks, sequence parallelism over tp.
        multiple = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
        rows = None if batching.max_tokens else batching.rows
        self._shape = Shape(rows, multiple)

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """The rank's rows in micro-batches, as many on every data-parallel rank. Collective."""
        if self._batching.max_tokens is None:
            return list(split(batch, self._shape))
        lengths = lengths_of(batch)
        groups = within_budget(lengths, self._batching.max_tokens)
        return list(split(batch, self._shape, groups_for(lengths, self._agree(len(groups)))))

    def _agree(self, count: int) -> int:
        found = torch.tensor(count, device=device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        pipeline = self.layout.pipeline if self.layout.virtual_pipeline > 1 else 1
        return -(-int(found) // pipeline) * pipeline  # the interleaved schedule runs them in rounds

    def rows(
        self,
        chunks: Sequence[Any],
        batch: Batch,
        wanted: Mapping[str, OnRows],
        around: Around = nothing_around,
    ) -> Batch:
        """What ``wanted`` makes of the outputs, without gradients: [b, s] each, 0 in the padding, in
        the batch's order, on the host; nothing outside the last pipeline stage."""
        found: dict[str, list[torch.Tensor]] = {name: [] for name in wanted}
        order: list[int] = []
        width = batch["input_ids"].shape[1]

        def collect(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            for name, call in wanted.items():
                found[name].append(call(output, micro, width))
            order.extend(micro.indices)
            return output.new_zeros(())

        with torch.no_grad():
            self.run(chunks, self.micro_batches(to_device(batch)), collect, True, around)
        if not order:
            return {}
        place = torch.tensor(order).argsort()
        seen = batch["attention_mask"]
        return {name: torch.cat(parts).cpu()[place] * seen for name, parts in found.items()}

    def update(
        self,
        trainable: Trainable,
        batch: Batch,
        on_output: OnOutput,
        names: Sequence[str],
        around: Around = nothing_around,
    ) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's rows. Collective.

        ``on_output`` says the loss of a micro-batch and, detached, the figures ``names``; both are sums
        over its tokens, whose weights are those of the global mini-batch. Returns the figures of the
        global mini-batch, and grad_norm and lr.
        """
        trainable.begin()
        width = batch["input_ids"].shape[1]
        micro = self.micro_batches(to_device(batch))
        # The schedule divides by the micro-batches, DDP averages over data-parallel ranks.
        scale = len(micro) * self.layout.data
        sums: list[torch.Tensor] = []

        def losses(output: torch.Tensor, part: MicroBatch) -> torch.Tensor:
            loss, figures = on_output(output, part, width)
            sums.append(figures)
            return loss * scale

        self.run(trainable.ddp, micro, losses, False, around)
        return summed(sums, names) | trainable.step()

    def run(
        self,
        chunks: Sequence[Any],
        micro: Sequence[MicroBatch],
        on_logits: OnLogits,
        forward_only: bool,
        around: Around = nothing_around,
    ) -> None:
        """Forward (and backward) of all micro-batches. On the last stage ``on_logits`` turns the
        logits of each into its loss. ``around``: what to hold open during a forward."""

        def forward(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            part = next(data)

            def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
                return on_logits(logits, part), {}

            with around(model, part):
                return _forward(model, part), loss

        # The schedule wants one iterator for each model chunk.
        data = [iter(micro) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro),
            seq_length=micro[0].input_ids.shape[1],
            micro_batch_size=micro[0].input_ids.shape[0],
            forward_only=forward_only,
        )


def to_device(batch: Batch) -> Batch:
    """The batch where this rank computes."""
    where = device()
    return {name: column.to(where) for name, column in batch.items()}


def _forward(model: Any, micro: MicroBatch) -> torch.Tensor:
    ids, positions = context_slice(micro.input_ids), context_slice(micro.position_ids)
    output: torch.Tensor = model(ids, positions, None, packed_seq_params=packed_params(micro))
    return output


def packed_params(micro: MicroBatch) -> PackedSeqParams | None:
    """Where the sequences of a packed micro-batch begin and end; None when it is padded."""
    if not micro.bounds:
        return None
    # On the host: Megatron-Core reads the bounds in every layer, which would stall a GPU.
    bounds = torch.tensor(micro.bounds, dtype=torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)


def context_slice(tokens: torch.Tensor) -> torch.Tensor:
    """This context-parallel rank's part of [b, s]."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tokens
    rank = parallel_state.get_context_parallel_rank()
    chunks = tokens.chunk(2 * size, dim=1)
    own = zigzag_chunks(size)[2 * rank : 2 * rank + 2]
    return torch.cat([chunks[place] for place in own], dim=1)


def context_whole(tokens: torch.Tensor) -> torch.Tensor:
    """Undo ``context_slice``: [b, s / cp] of every rank -> [b, s]. The gradient of a rank is that of
    its own part."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tokens
    group = parallel_state.get_context_parallel_group()
    gathered = gather_from_sequence_parallel_region(
        tokens.transpose(0, 1).contiguous(), tensor_parallel_output_grad=False, group=group
    )
    chunks = gathered.transpose(0, 1).chunk(2 * size, dim=1)
    held = zigzag_chunks(size)
    return torch.cat([chunks[held.index(place)] for place in range(2 * size)], dim=1)
