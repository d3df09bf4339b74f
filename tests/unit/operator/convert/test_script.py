"""Values of a shell script's variables, without running it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_operator.convert.reading.script import Argument, argument_lists


def last(script: str, **given: str) -> list[Argument]:
    return argument_lists(script, given)[-1]


def texts(script: str, **given: str) -> list[str]:
    return [argument.text for argument in last(script, **given)]


def test_continuations_quotes_and_comments_make_one_command() -> None:
    script = """set -x   # trace
python3 -m verl \\
    a.b='x # y' "c.d=[1, 2]" e=f\\ g \\
    h=2 2>&1 | tee log.txt
"""
    found = argument_lists(script, {})
    assert [word.text for word in found[1]] == [
        "python3",
        "-m",
        "verl",
        "a.b=x # y",
        "c.d=[1, 2]",
        "e=f g",
        "h=2",
    ]
    assert [word.line for word in found[1]] == [2, 2, 2, 3, 3, 3, 4]


def test_a_comment_ends_a_command_as_in_bash() -> None:
    found = argument_lists("run a=1 \\\n  # b.c=2 \\\n  d.e=3\n", {})
    assert [[word.text for word in words] for words in found] == [["run", "a=1"], ["d.e=3"]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=3; run $A ${A}4", ["run", "3", "34"]),
        ("export A=3 B=4\nrun $((A * B)) $(( (A + $B) / 2 - 1 ))", ["run", "12", "2"]),
        ("run ${A:-5} ${B:-${A:-6}} ${C-}", ["run", "5", "6"]),
        ('ROOT=${ROOT:-"/data"}\nrun "${ROOT}/x y"', ["run", "/data/x y"]),
        ("A='$B'; B=1; run $A", ["run", "$B"]),
        ("A=a; A+=b; run $A", ["run", "ab"]),
        ('A="x y"; run $A "$A"', ["run", "x", "y", "x y"]),
        ("ARGS=(--a 1 # first\n  --b '2 3'\n)\nARGS+=(--c)\nrun ${ARGS[@]} \"${ARGS[@]}\"",
         ["run", *["--a", "1", "--b", "2 3", "--c"] * 2]),
        ("run a $@ \"$@\" b", ["run", "a", "b"]),
        ("cat <<EOF\nrun x\nEOF\nrun y", ["run", "y"]),
        ("A=1 B=2 run $C{}", ["run", "${C}{}"]),
    ],
)  # fmt: skip
def test_variables_are_expanded(script: str, expected: list[str]) -> None:
    assert texts(script) == expected


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("run\\\n n=$NODES", "line 2: the script does not set NODES: add --define NODES=VALUE"),
        ("N=$(nproc)\nrun n=$N", "line 1: $(nproc) needs a run of the script"),
        ("N=`nproc`\nrun n=$N", "line 1: $(nproc) needs a run of the script"),
        (
            "N=8\nif [ $X = y ]; then\n  N=4\nfi\nrun n=$N",
            "line 3: N is set in a branch: add --define N=",
        ),
        ("N=8\ncase $X in\n  y) N=4;;\nesac\nrun n=$N", "line 3: N is set in a branch"),
        ("N=8\n[ $X = y ] && N=4\nrun n=$N", "line 2: N is set in a branch"),
        ("set_n() {\n  N=4\n}\nrun n=$N", "line 2: N is set in a branch"),
        ("run n=${NAME%.sh}", "line 1: ${NAME%.sh} needs a run of the script"),
        ("run n=$((2 ** 3))", "line 1: $((2 ** 3)) is no arithmetic of integers"),
        ("run n=$((__import__('os').getpid()))", "line 1: "),
        ("A=0; run n=$((8 / A))", "is no arithmetic of integers"),
        ("if true; then\n  A=(--x)\nfi\nrun ${A[@]}", "line 2: A has other words in a branch"),
        ("run ${ELSEWHERE[@]}", "line 1: the script does not set the array ELSEWHERE"),
    ],
)
def test_what_only_a_run_knows_stays_unknown(script: str, why: str) -> None:
    unknown = [argument.unknown for argument in last(script) if argument.unknown]
    assert len(unknown) == 1 and why in unknown[0]


def test_a_branch_that_repeats_the_value_changes_nothing() -> None:
    assert last("N=8\nif x; then N=8; fi\nrun $N")[-1] == Argument(3, "8")


def test_given_values_replace_unknown_ones() -> None:
    assert texts("run n=$NODES g=${GPUS:-8}", NODES="4", GPUS="2") == ["run", "n=4", "g=2"]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab=1+$(){}[]@:-'\"\\;&|<># \n`", max_size=40))
def test_any_text_is_read_to_its_end(script: str) -> None:
    for words in argument_lists(script, {}):
        assert all(1 <= word.line <= script.count("\n") + 1 for word in words)


def test_a_path_keeps_its_known_part() -> None:
    found = last("ROOT=${HOME}/data\nrun f=$ROOT/train.parquet")[-1]
    assert found.text == "f=${HOME}/data/train.parquet" and found.unknown
