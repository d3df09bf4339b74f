"""Efficiency of hardware and software, as measured (pure data).

``MEASURED`` is the fit of benchmarks/planner.py to measured cases with Megatron-Core's own kernels;
``TRANSFORMER_ENGINE`` and ``FP8_BLOCK128`` are those of benchmarks/kernel_fit.py. Their errors on other cases
are in benchmarks/results/planner.json.
"""

from dataclasses import dataclass, replace

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision, TrainerSpec


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of peak rates, and seconds of work that a peak rate does not explain.

    ``flops``: share of the peak bf16 rate at which the trainer's matrix products compute; where
    ``activation`` and ``weights`` are 0, all of its kernels. ``activation``: how often the bytes of each
    activation travel through the GPU's memory at its peak rate. ``weights``: the same for weights and
    gradients. ``expert``: seconds that each expert on the rank adds to a pass on the GPU. ``layer``:
    seconds in which the host starts the kernels of one layer in one pass; a backward pass counts as two.
    ``expert_layer``: the same in addition for a layer with experts. ``local_expert``: the same for each
    expert on the rank, where experts run or are quantised one by one. ``packed_sequence``: the same for
    each sequence of a packed micro-batch, where their attention runs one by one. ``runs_ahead``: the host
    starts kernels while the GPU computes earlier ones. ``optimizer``: bytes that an optimizer step moves
    for each parameter on the rank, at the peak rate of the GPU's memory. ``host``: factor of the host's
    times in a job, whose ranks share the host with Ray and other processes. ``first_call``: seconds by
    which a step's first call of the ranks takes longer than the same call later. ``decode_layer``,
    ``decode_expert_layer``: seconds that one layer, without or with experts, takes for one token of an
    engine beside the bytes that it reads; ``deterministic_layer``: the same for any layer of an engine
    with deterministic kernels. ``decode_sequence``: seconds that each running sequence adds to a token
    (sampling, and the engine's host). ``update_start``, ``update_tensor``: seconds of a weight update for
    itself and for each tensor, without the bytes. ``memory``, ``link``, ``engine_flops``: shares of the
    peak rates of GPU memory, of NVLink and network, and of an engine's matrix products; these three are
    assumed.
    """

    flops: float
    layer: float
    local_expert: float
    packed_sequence: float
    host: float
    first_call: float
    decode_layer: float
    decode_expert_layer: float
    decode_sequence: float
    deterministic_layer: float
    update_start: float
    update_tensor: float
    memory: float = 0.7
    link: float = 0.8
    engine_flops: float = 0.4
    activation: float = 0.0
    weights: float = 0.0
    expert: float = 0.0
    expert_layer: float = 0.0
    optimizer: float = 0.0
    runs_ahead: bool = False


# Bytes/s of a rank's copy to or from pinned memory beside those of the node's other ranks (assumed; alone, on
# an H100, 54e9).
HOST_RATE = 25e9

# benchmarks/planner.py fits these values; a unit test compares them with the fit.
MEASURED = Efficiency(
    flops=0.436,
    layer=0.0,
    local_expert=2.79e-4,
    packed_sequence=1.32e-4,
    host=2.94,
    first_call=0.4,
    decode_layer=1.33e-5,
    decode_expert_layer=6.74e-5,
    decode_sequence=1.06e-5,
    deterministic_layer=2.05e-4,
    update_start=6.46e-3,
    update_tensor=6.73e-7,
)
TRANSFORMER_ENGINE = replace(
    MEASURED, runs_ahead=True, packed_sequence=0.0,
    flops=0.708, activation=3.366, weights=1.0, expert=1.0244e-5, optimizer=75.42,
    layer=1.4585e-3, expert_layer=1.1079e-3, local_expert=7.448e-5,
)  # fmt: skip
FP8_BLOCK128 = replace(
    TRANSFORMER_ENGINE, flops=1.4, activation=8.266, layer=2.074e-3, local_expert=1.0379e-4,
)  # fmt: skip


def of_kernels(choice: KernelChoice, precision: Precision) -> Efficiency:
    """Return the efficiency of the trainer's kernels on GPUs. ``auto`` is Transformer Engine there."""
    if precision is Precision.FP8_BLOCK128:
        return FP8_BLOCK128
    return MEASURED if choice is KernelChoice.LOCAL else TRANSFORMER_ENGINE


def of_trainer(trainer: TrainerSpec) -> Efficiency:
    """Return the efficiency of a job's trainer."""
    if trainer.device is not Device.CUDA:
        return MEASURED
    return of_kernels(trainer.kernels, trainer.precision)
