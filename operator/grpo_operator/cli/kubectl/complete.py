"""``kubectl_complete-grpo``: what kubectl completes ``kubectl grpo`` with.

kubectl calls it with the words of the command line, the last of which is to be completed. It expects a line
for each candidate, with a description after a tab, and a directive of Cobra at the end.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

from grpo_operator.cli.kubectl.global_options import WITH_VALUE, separated
from grpo_operator.cli.kubectl.main import app

_FILES, _NO_FILES = 0, 4  # directives: whether the shell offers files too
_OF_FILES = ("plan", "rehearse", "convert")  # commands whose arguments are files
_VARIABLE = "_KUBECTL_GRPO_COMPLETE"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the candidates and the directive."""
    *words, last = (sys.argv[1:] if arguments is None else arguments) or [""]
    own, others = separated(words)
    if words and words[-1] in WITH_VALUE:
        others = []  # the value of an option of the plugin, which comes before all commands
    _print_candidates([*own, *others], last)
    print(f":{_directive(words, others)}")


def _print_candidates(words: list[str], last: str) -> None:
    """Let typer complete as it does for fish, whose candidates look like Cobra's."""
    line = shlex.join(["kubectl-grpo", *words]) + " " + (shlex.quote(last) if last else "")
    os.environ |= {
        _VARIABLE: "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": line,
    }
    with suppress(SystemExit):
        app(args=[], prog_name="kubectl-grpo", complete_var=_VARIABLE)


def _directive(words: Sequence[str], others: Sequence[str]) -> int:
    before = words[-1] if words else ""
    command = others[0] if others else ""
    files = command in _OF_FILES or before == "--kubeconfig"
    return _FILES if files or (command == "ui" and before in ("-o", "--output")) else _NO_FILES


if __name__ == "__main__":
    main()
