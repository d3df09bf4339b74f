"""Both clients have the same methods with the same arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from grpo_operator.client import AsyncGRPOClient, GRPOClient
from grpo_operator.client.samples_command import SampleOptions

METHODS = sorted(name for name, _ in inspect.getmembers(GRPOClient, callable) if not name.startswith("_"))


def _arguments(method: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return default and kind of each argument; a keyword may be one of SampleOptions."""
    found = dict(inspect.signature(method).parameters)
    if found.pop("options", None) is not None:
        samples = inspect.signature(GRPOClient.samples).parameters
        found |= {name: samples[name] for name in SampleOptions.__annotations__}
    return {name: (each.default, each.kind) for name, each in found.items()}


def test_no_client_has_more_methods() -> None:
    others = [name for name, _ in inspect.getmembers(AsyncGRPOClient, callable) if not name.startswith("_")]
    assert others == METHODS and {"create", "wait", "metrics_frame", "samples_frame"} <= set(METHODS)


@pytest.mark.parametrize("name", ["__init__", *METHODS])
def test_a_method_takes_the_same_arguments(name: str) -> None:
    sync, other = getattr(GRPOClient, name), getattr(AsyncGRPOClient, name)
    assert _arguments(sync) == _arguments(other)
    if name != "__init__":
        assert inspect.iscoroutinefunction(other) or inspect.isasyncgenfunction(other)


def test_the_options_of_samples_are_its_arguments() -> None:
    arguments = inspect.signature(GRPOClient.samples).parameters
    assert list(SampleOptions.__annotations__) == [name for name in arguments if name not in ("self", "name")]
