"""Confined programs: what they may do, what is refused, and what happens to those that exceed limits."""

import contextlib
import errno
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import Record
from grpo_worker.rewards.base import Item
from grpo_worker.rewards.function import FunctionVerifier
from grpo_worker.rewards.programs.client import ProgramServer
from grpo_worker.rewards.programs.scratch import empty, scratch_folder
from grpo_worker.rewards.programs.syscalls import ALLOWED, CONFINING

LIMIT = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ProgramServer]:
    server = ProgramServer()
    server.start()
    yield server
    server.close()


ORDINARY = {
    "threads": """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**27)
thread = threading.Thread(target=lambda: print("good"))
thread.start()
thread.join()
""",
    "thread pool": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(int, "123")) == 6
print("good")
""",
    "event loop": """
import asyncio
async def main():
    await asyncio.sleep(0.01)
    return await asyncio.to_thread(lambda: "good")
print(asyncio.run(main()))
""",
    "files": """
import os, shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    with open(folder + "/a", "w") as file:
        file.write("good")
    shutil.copy2(folder + "/a", folder + "/b")
    os.makedirs(folder + "/c/d")
    os.rename(folder + "/b", folder + "/c/d/b")
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    print(open(folder + "/c/d/b").read())
""",
    "alarm": """
import signal
def ring(*_):
    print("good")
    raise SystemExit
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.01)
while True:
    pass
""",
    "libraries": """
import ctypes, datetime, decimal, hashlib, mimetypes, random, sqlite3, ssl, uuid, zoneinfo
assert hashlib.sha256(b"").hexdigest() and mimetypes.guess_type("a.txt") and uuid.uuid4()
assert random.random() < 1
assert datetime.datetime.now(zoneinfo.ZoneInfo("Europe/Berlin")).year and datetime.datetime.now().astimezone()
print(sqlite3.connect("db").execute("select 'good'").fetchone()[0])
""",
    "numpy": "import numpy as np; a = np.ones((99, 99)); print('good' if (a @ a)[0, 0] == 99 else '')",
    "own limits": """
import resource
resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
print("good")
""",
    "exit at the end": "import atexit; atexit.register(print, 'good')",
    "exit code": "import sys; print('good'); sys.exit(0)",
    "signal to itself": """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("good"))
os.kill(os.getpid(), signal.SIGUSR1)
""",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_run(server: ProgramServer, name: str) -> None:
    assert (server.run(ORDINARY[name], "", "", LIMIT) or "").strip() == "good"


@pytest.mark.parametrize(
    "program", ["raise KeyError", "import os; os.abort()", "exit(3)", "this is no Python", "1/0"]
)
def test_programs_that_fail_have_no_output(server: ProgramServer, program: str) -> None:
    assert server.run(f"print('good', flush=True)\n{program}", "", "", LIMIT) is None


CALLS = """
import ctypes, errno
C = ctypes.CDLL(None, use_errno=True)
for name, number in NUMBERS.items():
    C.syscall(number, 0, 0, 0, 0, 0, 0)
    if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):
        print(name, ctypes.get_errno())
"""
# name=x86-64/arm64; the last stands for calls of kernels to come
DANGEROUS = """
    socket=41/198 connect=42/203 bind=49/200 sendmsg=46/211 io_uring_setup=425/425 ptrace=101/117
    process_vm_writev=311/271 pidfd_open=434/434 pidfd_getfd=438/438 rt_sigqueueinfo=129/138
    tkill=200/130 unshare=272/97 setns=308/268 mount=165/40 fsopen=430/430 open_tree=428/428
    bpf=321/280 perf_event_open=298/241 keyctl=250/219 add_key=248/217 userfaultfd=323/282
    execve=59/221 execveat=322/281 clone3=435/435 open_by_handle_at=304/265
    name_to_handle_at=303/264 quotactl=179/60 personality=135/92 setuid=105/146 capset=126/91
    mknodat=259/33 inotify_init1=294/26 fanotify_init=300/262 memfd_create=319/279 shmget=29/194
    msgget=68/186 mq_open=240/180 kcmp=312/272 setpriority=141/140 sched_setaffinity=203/122
    fallocate=285/47 truncate=76/45 setxattr=188/5 seccomp=317/277 future=9999/9999
"""


def dangerous() -> dict[str, int]:
    column = ("x86_64", "aarch64").index(platform.machine())
    entries = (entry.partition("=") for entry in DANGEROUS.split())
    return {name: int(numbers.split("/")[column]) for name, _, numbers in entries}


def test_dangerous_calls_are_refused(server: ProgramServer) -> None:
    numbers = dangerous()
    assert len(numbers) > 40 and not set(numbers.values()) & set(ALLOWED.values())
    assert server.run(CALLS.replace("NUMBERS", repr(numbers)), "", "", LIMIT) == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other kinds of calls are x86's")
@pytest.mark.parametrize("machine_code", ["b814000000cd80c3", "b8270000400f05c3"])
def test_calls_of_other_kinds_are_no_way_round(server: ProgramServer, machine_code: str) -> None:
    """Getpid by the 32-bit entry, which ends the program, and by a number of x32, which is refused."""
    program = f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("{machine_code}"))
print(ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    assert (server.run(program, "", "", LIMIT) or "-1").strip() == "-1"


def test_a_readable_file_cannot_be_emptied_by_opening_it(server: ProgramServer) -> None:
    program = "import os\ntry: os.open('program.py', os.O_TRUNC)\nexcept PermissionError: print('good')"
    assert server.run(program, "", "", LIMIT) == "good\n"


def test_a_program_that_takes_too_long_is_killed_and_the_next_one_runs(server: ProgramServer) -> None:
    started = time.monotonic()
    assert server.run("import time; print(1, flush=True); time.sleep(600)", "", "", 0.5) is None
    assert time.monotonic() - started < LIMIT
    assert server.run("print('good')", "", "", LIMIT) == "good\n"


def test_a_node_without_memory_kills_the_program_first(server: ProgramServer) -> None:
    assert server._process is not None
    own = psutil.Process(server._process.pid)
    running = threading.Thread(target=server.run, args=("import time; time.sleep(600)", "", "", 3))
    running.start()
    scores: set[str] = set()
    while "1000" not in scores and running.is_alive():
        for child in own.children():
            with contextlib.suppress(OSError):
                scores.add(Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip())
    running.join()
    assert "1000" in scores and Path(f"/proc/{own.pid}/oom_score_adj").read_text().strip() != "1000"


def test_programs_do_not_see_each_others_folders(server: ProgramServer) -> None:
    program = "import os; print(os.getcwd(), *os.listdir())"
    first, second = ((server.run(program, "", "", LIMIT) or "").split() for _ in range(2))
    assert first[0] != second[0] and first[1:] == second[1:] == ["program.py"]
    assert not Path(first[0]).exists()


def test_a_lost_server_costs_one_program(server: ProgramServer) -> None:
    assert server.run("print('good')", "", "", LIMIT) == "good\n"
    process = server._process
    assert process is not None
    process.kill()
    process.wait()
    assert server.run("print('good')", "", "", LIMIT) is None
    assert server.run("print('good')", "", "", LIMIT) == "good\n"


def test_any_folder_can_be_emptied() -> None:
    with scratch_folder() as folder:
        here = os.getcwd()
        os.chdir(folder)
        try:
            for _ in range(3000):  # deeper than recursion and paths reach
                os.mkdir("x")
                Path("file").touch()
                os.symlink("/", "link")
                os.chdir("x")
        finally:
            os.chdir(here)
        os.mkdir(f"{folder}/closed", 0)
        empty(folder)
        assert os.listdir(folder) == []
    assert not Path(folder).exists() and Path("/usr").exists()


def judged(sandbox: str, error: int, *numbers: int) -> tuple[str, str]:
    arguments = [sandbox, str(error), *map(str, numbers)]
    done = subprocess.run(
        [sys.executable, "-m", "support.judging_program", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


def test_without_landlock_the_job_fails_and_names_the_field() -> None:
    out, _ = judged("required", errno.ENOSYS, CONFINING["landlock_create_ruleset"])
    assert out.startswith(
        "error spec.reward.builtin=code: spec.reward.sandbox=required: the kernel offers no Landlock"
    )
    assert "use other nodes for the controller's pod, or set bestEffort" in out


def test_best_effort_runs_without_landlock_and_says_so() -> None:
    out, log = judged("bestEffort", errno.EOPNOTSUPP, CONFINING["landlock_create_ruleset"])
    assert out.startswith(
        "score 1.0 spec.reward.sandbox=bestEffort: the kernel of the controller's node offers no"
    )
    assert "the kernel offers no Landlock: programs can read the files" in log


def test_a_boundary_without_effect_is_noticed() -> None:
    """Landlock that accepts rules but restricts nothing, as an emulation may."""
    out, _ = judged("bestEffort", 0, CONFINING["landlock_restrict_self"])
    assert "programs cannot be confined on this node: Landlock has no effect" in out


def test_namespaces_that_a_container_refuses_are_not_needed() -> None:
    out, _ = judged("required", errno.EPERM, dangerous()["unshare"])
    assert out == "score 1.0 \n"


FUNCTION = """
from grpo_worker.rewards.builtin.run_python import run_python

def compute_score(solution_str, ground_truth):
    return float(run_python(solution_str, "", "", 10) == ground_truth)
"""


def test_users_functions_run_programs_in_the_sandbox(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    judge = FunctionVerifier(RewardSpec(function=f"{file}:compute_score", workers=1, on_failure="stop"))
    program = (
        f"import os\ntry: print(os.listdir({str(tmp_path)!r}))\nexcept PermissionError: print('refused')"
    )
    assert judge.score([Item(0, program, Record("mine", "refused\n", {}))]) == [1.0]
