"""Attacks on the sandbox of programs, all of which succeed without it, as root and as others; its cost."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable

from grpo_devcluster.results import record_from_test
from grpo_worker.rewards.programs.client import ProgramServer
from support.attacks import ATTACKS, ATTACKS_OF_ROOT
from support.users import NOBODY, run_as

PROGRAMS = 200
USERS = sorted({os.geteuid(), NOBODY}) if os.geteuid() == 0 else [os.geteuid()]


def test_no_attack_escapes() -> None:
    escapes, number = [], 0
    for user in USERS:
        attacks = [*ATTACKS, *(ATTACKS_OF_ROOT if user == 0 else ())]
        # Root also gets namespaces; others must do without, as in pods of the profile `restricted`.
        options = [] if user == 0 else ["--restricted"]
        done = run_as(user, ["-m", "support.attack_driver", *options, *attacks])
        assert done.returncode == 0, done.stderr
        outcomes = json.loads(done.stdout)
        assert list(outcomes) == attacks
        assert [name for name, (plain, _) in outcomes.items() if not plain] == [], (
            f"no attacks, as user {user}"
        )
        escapes += [(user, name) for name, (_, confined) in outcomes.items() if confined]
        number += len(outcomes)
    record_from_test("reliability", {"sandbox_attacks": number, "sandbox_escapes": len(escapes)})
    assert escapes == []


def test_a_confined_program_costs_about_the_cpu_of_a_bare_interpreter() -> None:
    """Programs are forked from an interpreter that is loaded already, which pays for the sandbox."""
    server = ProgramServer()
    server.start()

    def run_programs() -> None:
        for _ in range(PROGRAMS):
            assert server.run("print(3)", "", "", 60) == "3\n"
        server.close()  # its time counts when it has ended

    def start_interpreters() -> None:
        for _ in range(PROGRAMS):
            subprocess.run([sys.executable, "-I", "-c", "print(3)"], stdout=subprocess.DEVNULL, check=True)

    program, interpreter = (1000 * cpu_seconds(run) / PROGRAMS for run in (run_programs, start_interpreters))
    figures = {"sandbox_program_cpu_milliseconds": program, "interpreter_cpu_milliseconds": interpreter}
    record_from_test("reliability", {name: round(value, 1) for name, value in figures.items()})
    assert program < 2 * interpreter  # equal on an idle machine


def cpu_seconds(run: Callable[[], None]) -> float:
    """Return the CPU time of this process and of those that end while ``run`` runs."""

    def used() -> float:
        times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(time.ru_utime + time.ru_stime for time in times)

    before = used()
    run()
    return used() - before
