"""Loading of users' functions: ``package.module:function`` or ``/path/file.py:function``."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REMEDY = "give package.module:function, or /path/file.py:function with a path inside the pod"


def load_function(field: str, name: str) -> Callable[..., Any]:
    """Load the named function. ``field``: the job's field with the name, for the error message.

    Raises ValueError when the file, the module or the function does not exist, or when the module raises an
    error, with file and line.
    """
    source, _, function = name.rpartition(":")
    if source.endswith(".py") and not Path(source).is_file():
        raise ValueError(f"{field}={name}: no file {source}; {_REMEDY}")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # a user's module may raise anything
        problem = f"{error}; {_REMEDY}" if _is_missing(error, source) else blame(error, _file_name(source))
        raise ValueError(f"{field}={name}: {problem}") from error
    try:
        member = getattr(module, function)
    except AttributeError as error:
        raise ValueError(f"{field}={name}: {error}; {_REMEDY}") from error
    if not callable(member):
        raise ValueError(f"{field}={name}: {function} is not callable; {_REMEDY}")
    return member  # type: ignore[no-any-return]


def blame(error: BaseException, source: str) -> str:
    """Return ``file.py:12: KeyError: 'x'`` for an error, with its innermost line in the file ``source``.

    If the error passed no line of ``source``, the innermost line of all is used. ``source`` may be the end
    of a path.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [line for line in traceback.extract_tb(error.__traceback__) if line.filename[:1] != "<"]
    lines = [line for line in lines if line.filename.endswith(source)] or lines
    text = f"{type(error).__name__}: {error}"[:500]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: {text}" if lines else text


def _is_missing(error: Exception, module: str) -> bool:
    """Return whether the named module itself is missing, rather than one that it imports."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _file_name(source: str) -> str:
    return source if source.endswith(".py") else source.replace(".", "/") + ".py"


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"grpo_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its classes can be pickled
    spec.loader.exec_module(module)
    return module
