"""Refusal of system calls for this process and all that it starts, as by a container or another kernel."""

from grpo_worker.rewards.programs.kernel import forbid_new_privileges
from grpo_worker.rewards.programs.seccomp import Instruction, install

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def refuse(numbers: list[int], error: int) -> None:
    """Let the calls with these numbers fail with ``error``; 0 lets them seem to succeed."""
    code: list[Instruction] = [(_LOAD, 0, 0, 0)]
    for number in numbers:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    forbid_new_privileges()
    install([*code, (_RETURN, 0, 0, _ALLOW)])
