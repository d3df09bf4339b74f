"""What a version costs its sender and its receiver on one GPU besides the transport.

    python3 benchmarks/gpu/wave_work.py wave_work.json

A trainer rank packs and checks the waves of a version, and an engine rank checks and writes them, each with
a transfer group that moves nothing. Beside them: a copy of the same bytes in the GPU's memory. Work that
takes longer than the transport slows a version down.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from sync import SMALL, WIDE

from grpo_devcluster.results import stamp, write_raw
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.planner.boxes import held_regions
from grpo_worker.weightsync.planner.engine_plan import EnginePlan, plan_engine
from grpo_worker.weightsync.protocol.manifest import slices_of
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, TensorSpec, record
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError
from grpo_worker.weightsync.sglang_plugin.wave_loader import WaveLoader
from grpo_worker.weightsync.sglang_plugin.wave_receiver import WaveReceiver
from grpo_worker.weightsync.trainer.wave_packer import Shards
from grpo_worker.weightsync.trainer.wave_sender import WaveSender

ROUNDS = 6
BUCKET = 512 << 20
DEVICE = torch.device("cuda:0")
CASES = {"small": (SMALL, False), "wide": (WIDE, False), "fp8": (WIDE, True)}


class _Done:
    def wait(self) -> None: ...


class _NoTransport:
    """Transfer group whose transfers are done at once; the bytes of a wave are those of the one before."""

    def send(self, *_: Any) -> _Done:
        return _Done()

    exchange = send

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


class Places(torch.nn.Module):
    """Parameters where SGLang has them: those of all experts of a layer are one, and gate and up are too."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        super().__init__()
        self._targets: dict[str, torch.Tensor] = {}
        experts: dict[tuple[str, str], list[TensorSpec]] = {}
        for spec in specs:
            if ".mlp.experts." in spec.name:
                layer, _, rest = spec.name.partition(".experts.")
                _, matrix, kind = rest.split(".")
                experts.setdefault((layer, ("down." if matrix == "down_proj" else "up.") + kind), []).append(
                    spec
                )
            else:
                self._targets[spec.name] = self._new(spec.shape, spec.dtype)
        for of_layer in experts.values():
            self._add_experts(of_layer)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._targets[name].copy_(tensor)

    def _add_experts(self, specs: list[TensorSpec]) -> None:
        """Place the gates and ups, or the downs, of a layer's experts."""
        by_expert: dict[int, list[TensorSpec]] = {}
        for spec in specs:
            by_expert.setdefault(int(spec.name.partition(".experts.")[2].split(".")[0]), []).append(spec)
        rows, columns = specs[0].shape
        matrices = len(specs) // len(by_expert)
        whole = self._new((len(by_expert), matrices * rows, columns), specs[0].dtype)
        for expert, of_expert in sorted(by_expert.items()):
            for number, spec in enumerate(sorted(of_expert, key=lambda s: s.name)):
                self._targets[spec.name] = whole[expert, number * rows : (number + 1) * rows]

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=DEVICE), requires_grad=False)
        self.register_parameter(f"parameter{len(self._parameters)}", parameter)
        return parameter.data


def measure(model: dict[str, Any], fp8: bool) -> dict[str, float]:
    """Return the seconds of one version. Raises AssertionError if a wave is not what was packed."""
    shapes = family_of(model).shapes(model).items()
    parts: list[Part] = [(n, s, 0, 0, torch.randn(s, dtype=torch.bfloat16, device=DEVICE)) for n, s in shapes]
    described = [(*part[:-1], part[-1].to("meta")) for part in parts]
    sent = list(quantised_parts(described)) if fp8 else described
    specs = [TensorSpec(name, shape, tensor.dtype) for name, shape, *_, tensor in sent]
    places = Places(specs)
    recipe = record(places, specs)
    tensors, held = held_regions([slices_of(sent)])
    plan = plan_engine(tensors, held, {0: recipe.kept()}, lambda _: 0, BUCKET)
    nbytes = sum(message.nbytes for wave in plan.waves for message in wave)
    seconds = {"send": _sending(plan, parts), "copy": _copying(nbytes)}
    seconds["receive"] = _receiving(plan, places, recipe)
    return {f"{name}_seconds": value for name, value in seconds.items()} | {"bytes": float(nbytes)}


def _sending(plan: EnginePlan, parts: list[Part]) -> float:
    group: Any = _NoTransport()
    sender = WaveSender(plan.of_trainers(1)[0], group, 0, DEVICE)
    return _median(lambda: sender.send(Shards(parts), 60))


def _receiving(plan: EnginePlan, places: Places, recipe: Recipe) -> float:
    group: Any = _NoTransport()
    part = plan.of_engine(1)[0]
    loader = WaveLoader(places, recipe, part)
    receiver = WaveReceiver(part, 0, group, 0, [loader], DEVICE)
    receiver.prepare()

    def receive() -> None:
        try:
            receiver.receive(60)
        except DirectLoadError as error:
            if "are not those that were sent" not in str(error):  # nothing was sent
                raise

    return _median(receive)


def _copying(nbytes: int) -> float:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return _median(lambda: target.copy_(source))


def _median(work: Callable[[], object]) -> float:
    return statistics.median(list(_seconds(work))[1:])


def _seconds(work: Callable[[], object]) -> Iterator[float]:
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.monotonic()
        work()
        torch.cuda.synchronize()
        yield time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    cases: dict[str, dict[str, float]] = {}
    figures: dict[str, float] = {}
    for name, (model, fp8) in CASES.items():
        found = cases[name] = measure(model, fp8)
        figures |= {
            f"{side}_over_copy_{name}": found[f"{side}_seconds"] / found["copy_seconds"]
            for side in ("send", "receive")
        }
        torch.cuda.empty_cache()
    print(cases, figures)
    write_raw(args.result, stamp(f"1 x {torch.cuda.get_device_name()}"), cases=cases, figures=figures)


if __name__ == "__main__":
    main()
