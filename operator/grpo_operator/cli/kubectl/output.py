"""What commands print for programs: JSON or YAML in place of text."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from grpo_operator.cli.kubectl.arguments import errors


def _known(context: typer.Context, output: str) -> str:
    """Return the format; exit with 1 for others, before a command has changed anything."""
    if output not in ("text", "json", "yaml") and not context.resilient_parsing:
        with errors():
            raise ValueError(f"--output={output}: write json, yaml or text")
    return output


Format = Annotated[
    str,
    typer.Option("--output", "-o", help="json or yaml, or text", metavar="FORMAT", callback=_known),
]


def show(content: dict[str, Any], output: str) -> bool:
    """Print the content as JSON or YAML; return False for text, which the caller prints."""
    if output == "json":
        typer.echo(json.dumps(content, indent=2))
    elif output == "yaml":
        from grpo_operator.api import manifest_yaml  # takes a while, and few commands need it

        typer.echo(manifest_yaml.dump(content), nl=False)
    return output != "text"


def show_changed(change: Callable[..., str], output: str) -> None:
    """Change an object by a call of kubectl; print kubectl's message, or the object as JSON or YAML.

    ``change``: takes more options of kubectl. Raises what it raises.
    """
    if output == "text":
        typer.echo(change(), nl=False)
    else:
        show(json.loads(change("-o", "json")), output)
