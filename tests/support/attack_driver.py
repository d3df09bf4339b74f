"""Run each attack without and with the sandbox; print {attack: [escaped without, escaped with]} as JSON.

Uses only the standard library and the sandbox, so that any interpreter and user can run it: ``python -m
support.attack_driver [--restricted] NAME...``. Each attack has its own process, which is also its target.
--restricted: the sandbox starts where no privileges can be gained and no namespaces can be made, as in pods
of the profile ``restricted``.
"""

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_worker.rewards.programs import client
from support.attack_targets import SECRET, Targets
from support.attacks import ATTACKS, ATTACKS_OF_ROOT
from support.call_filter import refuse

_SECONDS = 8.0
_MEMORY = 2**30
_AT_ONCE = 4  # many attacks wait
_NAMESPACES = {"x86_64": [165, 272, 308], "aarch64": [40, 97, 268]}  # mount, unshare, setns
_LEFT = "process left behind"  # shows itself a second later


def main(restricted: bool, names: list[str]) -> None:
    confined = ("--confined", "--restricted") if restricted else ("--confined",)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = pool.map(lambda name: [_apart(name), _apart(name, *confined)], names)
        print(json.dumps(dict(zip(names, outcomes, strict=True))))


def _apart(name: str, *options: str) -> bool:
    command = [sys.executable, "-m", "support.attack_driver", "--one", *options, name]
    done = subprocess.run(
        command,
        env=os.environ | {"SECRET": SECRET},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    if done.returncode not in (0, 1) or done.stderr:
        raise RuntimeError(f"{name}: {done.returncode} {done.stderr}")
    return done.returncode == 1


def _one(name: str, confined: bool, restricted: bool) -> bool:
    """Return whether the attack succeeded."""
    if restricted:
        refuse(_NAMESPACES[os.uname().machine], errno.EPERM)
    program = (ATTACKS | ATTACKS_OF_ROOT)[name]
    targets = Targets()
    try:
        output = _confined(program, targets) if confined else _plain(program, targets)
        if name == _LEFT:
            time.sleep(1.5)
        return "ESCAPED" in output or targets.hit()
    finally:
        targets.close()


def _plain(program: str, targets: Targets) -> str:
    with tempfile.TemporaryDirectory(prefix="grpo-code-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "program.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "-I", "program.py"],
            cwd=folder,
            input=json.dumps(targets.described(folder)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            close_fds=False,
        )
        return done.stdout


def _confined(program: str, targets: Targets) -> str:
    """Run the program in the sandbox; it learns its folder from its working directory."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    read = "T = json.loads(sys.stdin.read())"
    text = program.replace(read, read + " | {'folder': os.getcwd()}")
    server = client.ProgramServer()
    server.start()
    try:
        return server.run(text, "", json.dumps(targets.described("")), _SECONDS) or ""
    finally:
        server.close()


if __name__ == "__main__":
    options = {argument for argument in sys.argv[1:] if argument.startswith("--")}
    names = [argument for argument in sys.argv[1:] if argument not in options]
    if "--one" in options:
        sys.exit(_one(names[0], "--confined" in options, "--restricted" in options))
    main("--restricted" in options, names)
