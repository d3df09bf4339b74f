"""Plain Python functions that users name: ``package.module:function`` or ``/path/file.py:function``."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_function(field: str, name: str) -> Callable[..., Any]:
    """The named function. ``field``: where the name was given, for the error.

    Raises ValueError when the file, the module or the function is not there.
    """
    place, _, function = name.rpartition(":")
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, function)
    except (ImportError, OSError, AttributeError) as error:
        raise ValueError(
            f"{field}={name}: {error}; give package.module:function, or /path/file.py:function with a path "
            "inside the pod"
        ) from error
    if not callable(found):
        raise ValueError(f"{field}={name}: {function} is no function")
    return found  # type: ignore[no-any-return]


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"grpo_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its classes can be pickled
    spec.loader.exec_module(module)
    return module
