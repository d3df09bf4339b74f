"""How a user's reward function wants to be called: as by verl, by TRL or by verifiers.

The names of its parameters tell. Each form offers its values by name; a function takes those that it
names, or all of them when it has ``**kwargs``.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# What a function is called with: an item's fields, see Item.request.
Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Argument:
    """One value that a form offers. ``fields``: the fields of a request that ``make`` is called with."""

    fields: tuple[str, ...]
    make: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Form:
    """One form. ``answer``: the argument that carries the answer; ``others``: what else tells the form.

    ``batch``: the function takes and returns lists, and may take the row's columns by name.
    """

    name: str
    text: str
    answer: str
    others: frozenset[str]
    arguments: Mapping[str, Argument]
    batch: bool = False


class TextParser:
    """verifiers' default parser: the answer is the text of the last message."""

    def parse(self, text: str) -> str:
        return text

    def parse_answer(self, completion: Any) -> str | None:
        if isinstance(completion, str):
            return completion
        return completion[-1]["content"] if completion else None


class TrainerState:
    """TRL's trainer_state, of which only ``global_step`` is known here."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"trainer_state has no {name!r} here: use trainer_state.global_step")


def _same(value: Any) -> Any:
    return value


def _list(value: Any) -> list[Any]:
    return [value]


def _completion(answer: str, prompt: Any) -> Any:
    """The answer in the prompt's form: chat messages or text."""
    is_text = prompt is None or isinstance(prompt, str)
    return answer if is_text else [{"role": "assistant", "content": answer}]


def _completions(answer: str, prompt: Any) -> list[Any]:
    return [_completion(answer, prompt)]


def _state(answer: str, prompt: Any, ground_truth: Any, extra_info: Any, data_source: str) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "completion": _completion(answer, prompt),
        "answer": ground_truth,
        "info": extra_info,
        "task": data_source,
    }


_ROW = ("data_source", "ground_truth", "extra_info")
_VERL = {name: Argument((name,), _same) for name in (*_ROW, "solution_str")}
_TRL = {name: Argument((name,), _list) for name in (*_ROW, "completion_ids")} | {
    "answer": Argument(("ground_truth",), _list),
    "prompts": Argument(("prompt",), _list),
    "completions": Argument(("solution_str", "prompt"), _completions),
    "trainer_state": Argument(("step",), TrainerState),
}
_VERIFIERS = {
    "prompt": Argument(("prompt",), _same),
    "completion": Argument(("solution_str", "prompt"), _completion),
    "answer": Argument(("ground_truth",), _same),
    "info": Argument(("extra_info",), _same),
    "task": Argument(("data_source",), _same),
    "state": Argument(("solution_str", "prompt", "ground_truth", "extra_info", "data_source"), _state),
    "parser": Argument((), TextParser),
}

FORMS = (
    Form(
        "verl", "data_source, solution_str, ground_truth, extra_info", "solution_str", frozenset(_ROW), _VERL
    ),
    Form(
        "TRL",
        "prompts, completions, completion_ids and the row's columns, all lists; trainer_state",
        "completions",
        frozenset({"prompts", "completion_ids", "trainer_state"}),
        _TRL,
        batch=True,
    ),
    Form(
        "verifiers",
        "prompt, completion, answer, state, task, info, parser",
        "completion",
        frozenset(_VERIFIERS),
        _VERIFIERS,
    ),
)
# TRL gives these in lists of their own.
_NO_COLUMNS = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids", "trainer_state"})


def form_of(function: Callable[..., Any]) -> Form:
    """Tell the form from the parameters' names. Raises TypeError that lists the forms when none fits."""
    parameters = _by_name(function)
    for form in FORMS:
        if form.answer in parameters:
            return form
    for form in FORMS:
        if form.others & parameters.keys():
            return form
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if required:
        raise TypeError(_unfit(function, required[0], "any form"))
    return FORMS[0]


def fields_of(function: Callable[..., Any], form: Form) -> list[str]:
    """List the fields of a request that the function needs: rows may be large, and go through a pipe."""
    needed = {field for name in _taken(function, form.arguments) for field in form.arguments[name].fields}
    return sorted(needed | {"columns"} if form.batch else needed)


def arguments(function: Callable[..., Any], form: Form, request: Request) -> dict[str, Any]:
    """Choose what the function takes. Raises TypeError for a parameter that its form lacks."""
    columns = {}
    if form.batch:
        columns = {name: [value] for name, value in request["columns"].items() if name not in _NO_COLUMNS}
    offered = form.arguments.keys() | columns.keys()
    for name, parameter in _by_name(function).items():
        if parameter.default is parameter.empty and name not in offered:
            names = ", ".join(request["columns"]) or "none" if form.batch else ""
            where = f"{form.name} (columns of the row: {names})" if form.batch else form.name
            raise TypeError(_unfit(function, name, f"the form of {where}"))
    given = {name: columns[name] for name in _taken(function, columns)}
    for name in _taken(function, form.arguments):
        if name not in columns:
            argument = form.arguments[name]
            given[name] = argument.make(*(request[field] for field in argument.fields))
    return given


def _taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> list[str]:
    """Names that the function takes of those offered."""
    found = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in found.values()):
        return list(offered)
    return [name for name in offered if name in found]


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
    forms = "; ".join(f"{form.name}: {form.text}" for form in FORMS)
    problem = f"{called} has parameter {parameter!r}, which is not in {where}"
    return f"{problem}. Take parameters of one form ({forms})"
