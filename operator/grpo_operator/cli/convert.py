"""``grpo-convert FILE``: turns a configuration of verl, slime or NeMo-RL into a GRPOJob.

The manifest goes to stdout; what became of each option goes to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_operator.api import manifest_yaml
from grpo_operator.api.catalog.gpus import GpuType
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import Conversion, convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.readers import detect, is_yaml
from grpo_operator.convert.reading.source import Framework
from grpo_operator.convert.reading.yaml_config import parents

_LISTS = (
    ("Taken over", "taken"),
    ("Chosen, because the source does not say it", "chosen"),
    ("Without counterpart", "missing"),
)
_DEPTH = 10  # of configurations that inherit from each other


def main(arguments: Sequence[str] | None = None, program: str = "grpo-convert") -> int:
    """Convert a file; return 1 if no job would train the same. ``program``: name in messages."""
    options = _parser(program).parse_args(arguments)
    try:
        texts = texts_of(options.file)
        framework = Framework(options.source) if options.source else detect(texts[-1])
        done = convert(framework, texts, _choices(options), dict(options.define), strict=options.strict)
    except (ConvertError, OSError, UnicodeDecodeError) as error:
        for line in str(error).splitlines():
            print(f"{program}: {line}", file=sys.stderr)
        return 1
    _print(done, options.output)
    return 0


def texts_of(file: Path, depth: int = 0) -> list[str]:
    """Return the texts of a configuration and, before it, of those that it inherits from.

    Raises OSError for a file that cannot be read, and ConvertError for a circle.
    """
    if depth > _DEPTH:
        raise ConvertError(f"{file}: defaults: configurations inherit from each other in a circle")
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    if not is_yaml(text) or detect(text) is not Framework.NEMO_RL:
        return [text]
    above = [texts_of(file.parent / name, depth + 1) for name in parents(text)]
    return [*(each for texts in above for each in texts), text]


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("file", type=Path, help="shell script or YAML file; -: standard input")
    parser.add_argument(
        "--from", dest="source", choices=[str(each) for each in Framework], help="default: by the content"
    )
    parser.add_argument("--name", default="", help="metadata.name; default: the name of the experiment")
    parser.add_argument(
        "--reward",
        default="",
        help="math, code, json, choice, /data/FILE.py:FUNCTION or the URL of a server",
    )
    parser.add_argument(
        "--rollout-nodes", type=_positive, metavar="N", help="nodes for engines only: mode static"
    )
    parser.add_argument("--nodes", type=_positive, metavar="N", help="all nodes; default: as the source")
    parser.add_argument(
        "--gpu-type", choices=[str(each) for each in GpuType], default="", help="default: h100-80gb"
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="totalSteps")
    parser.add_argument("--rows", type=_positive, metavar="N", help="rows of the data: epochs become steps")
    parser.add_argument(
        "--define", action="append", default=[], type=_definition, metavar="NAME=VALUE",
        help="value of a variable that the source takes from elsewhere; may be repeated",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="fail if an option has no counterpart")
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _definition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _choices(options: argparse.Namespace) -> Choices:
    return Choices(
        options.name, options.reward, options.rollout_nodes, options.nodes, options.steps, options.rows,
        options.gpu_type,
    )  # fmt: skip


def _print(done: Conversion, output: str) -> None:
    if output == "json":
        print(json.dumps(done.manifest, indent=2))
    else:
        print(manifest_yaml.dump(done.manifest), end="")
    for title, name in _LISTS:
        lines = getattr(done, name)
        print(f"{title}: {len(lines)}", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
