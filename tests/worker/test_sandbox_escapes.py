"""Attacks on the sandbox of programs: each succeeds without it, and none with it, as root and as others."""

import json
import os

from grpo_devcluster.results import record_from_test
from support.attacks import ATTACKS, ATTACKS_OF_ROOT
from support.users import NOBODY, run_as

USERS = sorted({os.geteuid(), NOBODY}) if os.geteuid() == 0 else [os.geteuid()]


def test_no_attack_escapes() -> None:
    escapes, number = [], 0
    for user in USERS:
        attacks = [*ATTACKS, *(ATTACKS_OF_ROOT if user == 0 else ())]
        done = run_as(user, ["-m", "support.attack_driver", *attacks])
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
