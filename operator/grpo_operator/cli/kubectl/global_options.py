"""Options that kubectl's users write anywhere in a command (pure)."""

from collections.abc import Iterable

WITH_VALUE = ("-n", "--namespace", "--context", "--kubeconfig", "--kubectl")


def hoisted(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with the plugin's own options before the name of the command."""
    first, others = separated(arguments)
    return first + others


def separated(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the plugin's own options, and all other arguments. After ``--`` there are no options."""
    first: list[str] = []
    others: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == "--":
            others += [argument, *pending]
            break
        if argument in WITH_VALUE:
            first += [argument, *pending[:1]]
            del pending[:1]
        elif argument.startswith(tuple(f"{name}=" for name in WITH_VALUE)):
            first.append(argument)
        else:
            others.append(argument)
    return first, others
