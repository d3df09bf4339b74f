"""``python -m support.limited_imports``: imports modules as if only some packages were installed.

Reads from standard input a JSON object with ``packages``, the names of the packages that there are beside the
standard library, and ``modules``. Prints a JSON object with the error of each module that cannot be imported.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any


class Limited:
    """A finder of modules that finds those of some packages and of the standard library only."""

    def __init__(self, finder: Any, packages: Sequence[str]) -> None:
        self._finder = finder
        self._packages = {*packages, *sys.stdlib_module_names}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in self._packages and not package.startswith("_sysconfigdata"):
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, path, target)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main() -> None:
    asked = json.load(sys.stdin)
    sys.meta_path[:] = [Limited(finder, asked["packages"]) for finder in sys.meta_path]
    errors: dict[str, str] = {}
    for name in asked["modules"]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            errors[name] = str(error)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
