"""How a user's reward function wants to be called: as by verl, by TRL or by verifiers.

The names of its parameters tell. Each form offers its values by name; a function takes those that it
names, or all of them when it has ``**kwargs``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# What a function is called with: an item's fields, see Item.request.
Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One form. ``answer``: the parameter that carries the answer; ``others``: what else tells the form.

    ``batch``: the function takes and returns lists.
    """

    name: str
    text: str
    answer: str
    others: frozenset[str]
    offer: Callable[[Request], dict[str, Any]]
    batch: bool = False


class TextParser:
    """verifiers' default parser: the answer is the text of the last message."""

    def parse(self, text: str) -> str:
        return text

    def parse_answer(self, completion: Any) -> str | None:
        if isinstance(completion, str):
            return completion
        return completion[-1]["content"] if completion else None


def _completion(request: Request) -> Any:
    """The answer in the prompt's form: chat messages or text."""
    answer = request["solution_str"]
    return answer if _is_text(request["prompt"]) else [{"role": "assistant", "content": answer}]


def _is_text(prompt: Any) -> bool:
    return prompt is None or isinstance(prompt, str)


def _verl(request: Request) -> dict[str, Any]:
    return {name: request[name] for name in ("data_source", "solution_str", "ground_truth", "extra_info")}


def _trl(request: Request) -> dict[str, Any]:
    row = {
        "answer": request["ground_truth"],
        "ground_truth": request["ground_truth"],
        "data_source": request["data_source"],
        "extra_info": request["extra_info"],
    } | request["columns"]
    batch = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    return batch | {"prompts": [request["prompt"]], "completions": [_completion(request)]}


def _verifiers(request: Request) -> dict[str, Any]:
    state = {
        "prompt": request["prompt"],
        "completion": _completion(request),
        "answer": request["ground_truth"],
        "info": request["extra_info"],
        "task": request["data_source"],
    }
    return state | {"state": dict(state), "parser": TextParser()}


SHAPES = (
    Shape(
        "verl",
        "data_source, solution_str, ground_truth, extra_info",
        "solution_str",
        frozenset({"data_source", "ground_truth", "extra_info"}),
        _verl,
    ),
    Shape(
        "TRL",
        "prompts, completions and the row's columns, all lists",
        "completions",
        frozenset({"prompts"}),
        _trl,
        batch=True,
    ),
    Shape(
        "verifiers",
        "prompt, completion, answer, state, task, info, parser",
        "completion",
        frozenset({"prompt", "answer", "state", "task", "info", "parser"}),
        _verifiers,
    ),
)


def shape_of(function: Callable[..., Any]) -> Shape:
    """Tell the form from the parameters' names. Raises TypeError that lists the forms when none fits."""
    parameters = _by_name(function)
    for shape in SHAPES:
        if shape.answer in parameters:
            return shape
    for shape in SHAPES:
        if shape.others & parameters.keys():
            return shape
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if required:
        raise TypeError(_unfit(function, required[0], "any form"))
    return SHAPES[0]


def arguments(function: Callable[..., Any], shape: Shape, request: Request) -> dict[str, Any]:
    """Choose what the function takes. Raises TypeError for a parameter that its form lacks."""
    offered = shape.offer(request)
    parameters = _by_name(function)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in offered
    ]
    if missing:
        columns = ", ".join(request["columns"]) or "none"
        where = f"{shape.name} (columns of the row: {columns})" if shape.batch else shape.name
        raise TypeError(_unfit(function, missing[0], f"the form of {where}"))
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def _by_name(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters that must or may be given by name. Raises TypeError for those that cannot."""
    try:
        found = inspect.signature(function).parameters
    except ValueError as error:
        raise TypeError(f"{error}: wrap it in a Python function") from error
    for name, parameter in found.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"parameter {name!r} is positional-only: remove the '/' after it")
    return {name: p for name, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _unfit(function: Callable[..., Any], parameter: str, where: str) -> str:
    called = getattr(function, "__name__", "the function")
    forms = "; ".join(f"{shape.name}: {shape.text}" for shape in SHAPES)
    problem = f"{called} has parameter {parameter!r}, which is not in {where}"
    return f"{problem}. Take parameters of one form ({forms})"
