"""How SGLang's models load small models of every family, on the first of two ranks and without its peer.

Run as a process of its own: SGLang's configuration is global.
"""

import json
import sys
import tempfile

import torch

from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.weightsync.sglang_plugin.load_tracer import trace_load
from support.ranks.engine_cases import build, process_groups, server_arguments
from support.tiny_models import tiny_model


def traced(name: str) -> dict[str, list[str]]:
    """Trace the load of a model's bf16 weights.

    Returns names of tensors: ``copied`` into parameters, ``unexplained`` by copies, and ``ignored``.
    """
    hf = tiny_model(name)
    source, shapes = SeededWeights(hf, 1), family_of(hf).shapes(hf)
    weights = [(name, source.read(name, 0, 0, shape[0]).bfloat16()) for name, shape in shapes.items()]
    with (
        tempfile.TemporaryDirectory() as folder,
        process_groups(server_arguments(folder, hf, EngineShape(2))) as arguments,
    ):
        (model,) = build(arguments, torch.device("cpu"))
        trace = trace_load(model.load_weights, weights)
    seen = {*trace.copies, *trace.unexplained}
    return {
        "copied": sorted(trace.copies),
        "unexplained": sorted(trace.unexplained),
        "ignored": sorted({*shapes} - seen),
    }


if __name__ == "__main__":
    print("\n" + json.dumps({name: traced(name) for name in json.loads(sys.stdin.read())}))
