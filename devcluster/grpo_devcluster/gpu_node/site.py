"""``make gpu-node-site``: Python packages of jobs that the environment of a machine with GPUs lacks.

Makes a folder in the cache, named by the content of its pins and rules, which ``make gpu-node-pack`` packs.
GRPO_GPU_NODE_WHEELS: a folder of wheels that no index has.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from grpo_devcluster.gpu_node import site_check
from grpo_devcluster.gpu_node.site_rules import (
    PINS,
    RULES,
    STUBS,
    Pin,
    Rules,
    folder_for,
    own_wheels,
    read_pins,
    read_rules,
)
from grpo_devcluster.gpu_node.site_trim import trim
from grpo_devcluster.packages import uv, uv_environment
from grpo_devcluster.stages import StageError, fail, run, stage

PLATFORM = "x86_64-manylinux_2_39"  # the machine's glibc or an older one


def main() -> None:
    """Make the folder if it is not there, and print its path, its size and what is missing."""
    try:
        rules = read_rules(RULES.read_text())
        wheels = own_wheels(rules, os.environ.get("GRPO_GPU_NODE_WHEELS"))
        folder = make(rules, wheels)
    except StageError as error:
        fail(error)
    for wheel in missing(rules, wheels):
        print(wheel)
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    print(f"{folder}: {size / 1e6:.0f} MB. make gpu-node-pack packs it.")


def make(rules: Rules, wheels: Mapping[str, Path]) -> Path:
    """Install, trim and check the packages; return the folder, which is then the latest of these pins."""
    target = folder_for(wheels)
    if target.exists():
        os.utime(target)
        return target
    temporary = target.with_suffix(".installing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _fill(temporary, rules, wheels)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    os.utime(target)
    return target


def _fill(folder: Path, rules: Rules, wheels: Mapping[str, Path]) -> None:
    pins = used_pins(read_pins(PINS.read_text()), rules, wheels)
    with stage(f"installing {len(pins)} packages for Python {site_check.PYTHON}"):
        _install(pins, wheels, folder)
    with stage("checking what the packages require"):
        found = site_check.problems(folder, rules)
    if found:
        listed = "\n  ".join(found)
        raise StageError(f"{PINS.name} and {RULES.name} do not fit each other:\n  {listed}")
    with stage("removing what jobs do not read"):
        trim(folder, rules)


def used_pins(pins: list[Pin], rules: Rules, wheels: Mapping[str, Path]) -> list[Pin]:
    """Return the pins without those of packages that are of no use without a wheel that is missing."""
    useless = {name for wheel in rules.own_wheels if wheel.name not in wheels for name in wheel.serves}
    return [pin for pin in pins if pin.name not in useless]


def missing(rules: Rules, wheels: Mapping[str, Path]) -> list[str]:
    """Return a sentence for each wheel that was not given."""
    return [
        f"MISSING: {wheel.pattern}, which no index has. {', '.join(wheel.serves)} are left out with it: "
        f"{wheel.without}. {RULES.name} says how to build it; name its folder in GRPO_GPU_NODE_WHEELS."
        for wheel in rules.own_wheels
        if wheel.name not in wheels
    ]


def _install(pins: list[Pin], wheels: Mapping[str, Path], target: Path) -> None:
    """Install for the machine's Python and platform, with the hashes of all that is downloaded."""
    requirements = "".join(f"{pin.name}=={pin.version} --hash={pin.hash}\n" for pin in pins)
    machine = ["--python-version", site_check.PYTHON, "--python-platform", PLATFORM]
    common = ["pip", "install", "--python", sys.executable, *machine, "--no-deps", "--target", target]
    # Copies, because they are stripped. Bytecode is compiled on the machine, for its Python.
    env = uv_environment() | {"UV_LINK_MODE": "copy", "UV_COMPILE_BYTECODE": "0"}
    remedy = "Check that uv reaches a package index, then run the command again."
    command = [uv(), *common, "--require-hashes", "-r", "-"]
    run(command, step=f"installing {PINS.name}", remedy=remedy, env=env, stdin=requirements)
    if wheels:
        command = [uv(), *common, *wheels.values()]
        run(command, step="installing own wheels", remedy="Are they for Python 3.12?", env=env)
    shutil.copytree(STUBS, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    main()
