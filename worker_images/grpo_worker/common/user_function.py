"""Plain Python functions that users name: ``package.module:function`` or ``/path/file.py:function``."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REMEDY = "give package.module:function, or /path/file.py:function with a path inside the pod"


def load_function(field: str, name: str) -> Callable[..., Any]:
    """Load the named function. ``field``: where the name was given, for the error.

    Raises ValueError when the file, the module or the function is not there, or when the module raises;
    the error names file and line then.
    """
    place, _, function = name.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{field}={name}: no file {place}; {_REMEDY}")
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever a user's module raises
        problem = f"{error}; {_REMEDY}" if _absent(error, place) else blame(error, _source(place))
        raise ValueError(f"{field}={name}: {problem}") from error
    try:
        found = getattr(module, function)
    except AttributeError as error:
        raise ValueError(f"{field}={name}: {error}; {_REMEDY}") from error
    if not callable(found):
        raise ValueError(f"{field}={name}: {function} is no function")
    return found  # type: ignore[no-any-return]


def blame(error: BaseException, source: str) -> str:
    """Say ``file.py:12: KeyError: 'x'`` of an error, by the innermost line of the file ``source``.

    When the error passed no line of ``source``, the innermost line of all is named. ``source`` may be
    the end of a path.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [line for line in traceback.extract_tb(error.__traceback__) if line.filename[:1] != "<"]
    lines = [line for line in lines if line.filename.endswith(source)] or lines
    text = f"{type(error).__name__}: {error}"[:500]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: {text}" if lines else text


def _absent(error: Exception, place: str) -> bool:
    """Is it the named module that is missing, and not one that it needs?"""
    return isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}.")


def _source(place: str) -> str:
    return place if place.endswith(".py") else place.replace(".", "/") + ".py"


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"grpo_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its classes can be pickled
    spec.loader.exec_module(module)
    return module
