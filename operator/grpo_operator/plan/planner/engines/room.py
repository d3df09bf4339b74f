"""Problems of engines whose weights and KV cache do not fit on their GPUs (pure)."""

from grpo_operator.api.catalog.gpus import GPUS, RESERVED
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec
from grpo_operator.plan.planner.engines.memory import EngineMemory
from grpo_operator.plan.planner.engines.shape import EngineShape


def shared_problem(engine: EngineSpec, field: str) -> str:
    """Return an error if no memory is left for what both sides keep while the other one uses the GPU."""
    limit = _hundredths(1 - 2 * RESERVED / GPUS[engine.gpu_type].memory)
    if engine.memory_fraction <= limit:
        return ""
    return (
        f"{field}.memoryFraction={engine.memory_fraction}: on GPUs that engines share with trainers, "
        f"{gigabytes(2 * RESERVED)} of each {engine.gpu_type} must stay free: set it to {limit} or less"
    )


def room_problem(engine: EngineSpec, shape: EngineShape, memory: EngineMemory, field: str) -> str:
    """Return an error if a sequence does not fit in the KV cache, or the second copy not beside the first."""
    gpu = GPUS[engine.gpu_type]
    if memory.kv_tokens < engine.context_length:
        return (
            f"{field}.tensorParallel={shape.tensor}: weights take {gigabytes(memory.weights)} of "
            f"{gigabytes(gpu.memory * engine.memory_fraction)} on each {engine.gpu_type}, which leaves a KV "
            f"cache of {memory.kv_tokens} tokens, less than contextLength={engine.context_length}: raise "
            "tensorParallel, lower contextLength, or set quantization to fp8-block128"
        )
    limit = _hundredths(1 - (memory.weights + RESERVED) / gpu.memory)
    if not engine.double_buffer or engine.memory_fraction <= limit:
        return ""
    least = memory.weights + engine.context_length * memory.kv_per_token
    fits = gpu.memory * limit >= least
    return (
        f"{field}.doubleBuffer=true: a second copy of the weights takes {gigabytes(memory.weights)} of each "
        f"{engine.gpu_type}, beside memoryFraction={engine.memory_fraction} and {gigabytes(RESERVED)}: "
        + (f"set memoryFraction to {limit} or less" if fits else "set doubleBuffer to false")
    )


def gigabytes(amount: float) -> str:
    """Return an amount of bytes as text."""
    return f"{amount / 1e9:.1f} GB"


def _hundredths(share: float) -> float:
    """Round down."""
    return int(100 * share) / 100
