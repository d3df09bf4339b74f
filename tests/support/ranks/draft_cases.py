"""An engine rank that drafts, built by SGLang's own classes, takes versions from a trainer rank over gloo.

The models, SGLang's loaders, the plugin's hooks and the transfer group are real; torch's "fake" backend
stands for the engine's other ranks. Run as a process of its own: SGLang's configuration is global.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_worker.quantization.fp8 import quantised_parts
from grpo_worker.weightsync.protocol.direct_load import LINK_LOAD
from grpo_worker.weightsync.sglang_plugin import engine_ranks, hooks
from support.ranks import engine_cases
from support.ranks.draft_trainer import NAME, parts_of

_DERIVED = ("w_kc", "w_vc", "w_scale")  # computed by SGLang after a load; no parameters


def loaded(case: dict[str, Any]) -> dict[str, Any]:
    """Send the case's versions to an engine rank.

    Returns the answers to the calls for both models, version by version, and the tensors that differ from
    those of models that SGLang loaded by itself.
    """
    hf, engine = case["hf"], EngineShape(**case["shape"])
    settings: dict[str, Any] = {"hf": hf, "fp8": engine.fp8, "mtp": case["mtp"]}
    versions = range(1, case["versions"] + 1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        arguments = engine_cases.server_arguments(folder, hf, engine)
        stack.enter_context(engine_cases.process_groups(arguments))
        stack.enter_context(patch.object(hooks, "_drafts", []))
        # The peers of torch's fake backend answer nothing.
        stack.enter_context(patch.object(engine_ranks, "gather", lambda value: [value]))
        models, own = (engine_cases.build(arguments, torch.device("cpu")) for _ in range(2))
        served, draft = _updater(models[0], False), _updater(models[1], True)
        problems: list[str] = []
        settings["versions"] = len(versions)
        port, send_next = stack.enter_context(_trainer(settings, problems))
        joined = hooks._on_join(_stock, served, "127.0.0.1", port, 1, 2, NAME, "gloo")
        answers, differing, compared = [], [], 0
        for version in versions if joined[0] else ():
            send_next()
            weights = _announced(served)
            answers.append([hooks._on_load(_stock, each, weights) for each in (served, draft)])
            _load_by_itself(own, settings, version)
            for model, other in zip(models, own, strict=True):
                ours, wanted = _state(model), _state(other)
                compared += len(wanted)
                differing += [name for name in wanted if not _same(wanted[name], ours[name])]
        if joined[0]:
            hooks._on_leave(_stock, served, NAME)
    found = {"joined": joined, "answers": answers, "differing": differing, "compared": compared}
    return found | {"problems": problems}


@contextmanager
def _trainer(settings: dict[str, Any], problems: list[str]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Run the trainer's rank in a process; yield the port of its store and the call to send a version.

    At the end ``problems`` are those of the rank.
    """
    command = [sys.executable, "-m", "support.ranks.draft_trainer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin = process.stdin

        def write(line: str = "next") -> None:
            stdin.write(line + "\n")
            stdin.flush()

        try:
            write(json.dumps(settings))
            yield int(process.stdout.readline()), write
            problems += json.loads(process.stdout.readline())
        finally:
            process.kill()


def _updater(model: Any, draft: bool) -> Any:
    """Return what the hooks get from SGLang: the updater of a model's runner."""
    runner = SimpleNamespace(model=model, is_draft_worker=draft)
    hooks._on_load_model(lambda _: None, runner)
    place = {"device": "cpu", "tp_rank": 0}
    return SimpleNamespace(get_model=lambda: model, get_model_runner=lambda: runner, **place)


def _announced(served: Any) -> Any:
    load_format = f"{LINK_LOAD}60"
    return hooks._on_receive(
        _stock, served, load_format=load_format, group_name=NAME, names=[], dtypes=[], shapes=[]
    )


def _load_by_itself(models: list[Any], settings: dict[str, Any], version: int) -> None:
    parts = parts_of(settings["hf"], version, settings["mtp"])
    rows = list(quantised_parts(parts)) if settings["fp8"] else parts
    for model in models:
        model.load_weights((part[0], part[-1]) for part in rows)


def _state(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's tensors, and those that SGLang computes from them."""
    found = dict(model.state_dict())
    for name, module in model.named_modules():
        values = {key: getattr(module, key, None) for key in _DERIVED}
        found |= {f"{name}.{key}": value for key, value in values.items() if torch.is_tensor(value)}
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def _stock(*_: Any, **__: Any) -> Any:
    raise AssertionError("SGLang's own route must not be taken")


if __name__ == "__main__":
    print("\n" + json.dumps([loaded(case) for case in json.loads(sys.stdin.read())]))
