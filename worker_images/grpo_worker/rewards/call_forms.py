"""Call forms of users' reward functions: those of verl, TRL and verifiers.

The names of a function's parameters determine its form. Each form offers values by name; a function receives
the values that it names, or all of them if it has ``**kwargs``.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Fields from which the arguments are made, see Item.request.
Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Argument:
    """A value that a form offers, made by ``make`` from the ``fields`` of a request."""

    fields: tuple[str, ...]
    make: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Form:
    """A call form.

    ``text``: its parameters, for error messages. ``answer``: argument that contains the answer; ``others``:
    further names that identify the form. ``batch``: the function takes and returns lists, and may take the
    row's columns by name.
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
        """Return the text unchanged."""
        return text

    def parse_answer(self, completion: Any) -> str | None:
        """Return the text of a completion's last message."""
        if isinstance(completion, str):
            return completion
        return completion[-1]["content"] if completion else None


class TrainerState:
    """TRL's trainer_state, with ``global_step`` only."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"trainer_state has no {name!r} here: use trainer_state.global_step")


def _same(value: Any) -> Any:
    return value


def _list(value: Any) -> list[Any]:
    return [value]


def _completion(answer: str, prompt: Any) -> Any:
    """Return the answer in the prompt's form: chat messages or text."""
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
# Columns with these names are hidden by TRL's own arguments.
_NO_COLUMNS = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids", "trainer_state"})


def form_of(function: Callable[..., Any]) -> Form:
    """Return the form that the parameters' names indicate.

    Raises TypeError that lists the forms when none fits.
    """
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
    """Return the fields of a request that the function needs; rows may be too large to send all of them."""
    names = _accepted(function, form.arguments)
    needed = {field for name in names for field in form.arguments[name].fields}
    return sorted(needed | {"columns"} if form.batch else needed)


def arguments(function: Callable[..., Any], form: Form, request: Request) -> dict[str, Any]:
    """Return the function's keyword arguments. Raises TypeError for a parameter that its form lacks."""
    columns = {}
    if form.batch:
        columns = {name: [value] for name, value in request["columns"].items() if name not in _NO_COLUMNS}
    offered = form.arguments.keys() | columns.keys()
    for name, parameter in _by_name(function).items():
        if parameter.default is parameter.empty and name not in offered:
            names = ", ".join(request["columns"]) or "none" if form.batch else ""
            where = f"{form.name} (columns of the row: {names})" if form.batch else form.name
            raise TypeError(_unfit(function, name, f"the form of {where}"))
    keywords = {name: columns[name] for name in _accepted(function, columns)}
    for name in _accepted(function, form.arguments):
        if name not in columns:
            argument = form.arguments[name]
            keywords[name] = argument.make(*(request[field] for field in argument.fields))
    return keywords


def _accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> list[str]:
    """Return the offered names that the function accepts as keywords."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return list(offered)
    return [name for name in offered if name in parameters]


def _by_name(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters. Raises TypeError for positional-only ones."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise TypeError(f"{error}: wrap it in a Python function") from error
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"parameter {name!r} is positional-only: remove the '/' after it")
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _unfit(function: Callable[..., Any], parameter: str, where: str) -> str:
    name = getattr(function, "__name__", "the function")
    forms = "; ".join(f"{form.name}: {form.text}" for form in FORMS)
    problem = f"{name} has parameter {parameter!r}, which is not in {where}"
    return f"{problem}. Take parameters of one form ({forms})"
