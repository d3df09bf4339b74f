"""Arguments and errors of all commands of ``kubectl grpo``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from grpo_operator.cli.kubectl import cluster_names
from grpo_operator.cli.kubectl.cluster import KubectlError

Job = Annotated[
    str, typer.Argument(help="name of the GRPOJob", metavar="JOB", autocompletion=cluster_names.jobs)
]


@contextmanager
def errors() -> Iterator[None]:
    """Print errors of kubectl and of the input in one line, and exit with 1."""
    try:
        yield
    except (KubectlError, ValueError) as error:
        typer.echo(f"kubectl grpo: {error}", err=True)
        raise SystemExit(1) from None
