"""Programs that try to leave the sandbox. Each prints ESCAPED, or has an effect that its target shows.

They get a JSON object of targets on standard input: see attack_targets.py.
"""

import os

PRELUDE = """
import ctypes, fcntl, json, os, resource, signal, socket, stat, subprocess, sys, threading, time
T = json.loads(sys.stdin.read())
C = ctypes.CDLL(None, use_errno=True)
def must(good):
    if not good:
        raise SystemExit("held back")
def escaped():
    print("ESCAPED", flush=True)
    os._exit(0)
"""

_NETWORK = {
    "tcp": "must(socket.create_connection(('127.0.0.1', T['tcp']), 2).recv(9) == b'greeting!'); escaped()",
    "tcp server": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped()",
    "udp": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', T['udp']))",
    "unix socket": "s = socket.socket(socket.AF_UNIX); s.connect(T['unix']); escaped()",
    "abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + T['abstract']); escaped()",
    "pair of datagram sockets": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "a.sendto(b'x', '\\0' + T['datagrams'])",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0)); escaped()",
}
_READING = {
    "own environment": "must(T['secret'] in os.environ.values()); escaped()",
    "environment in proc": "must(T['secret'] in open(f'/proc/{T[\"pid\"]}/environ').read()); escaped()",
    "key": "must(open(T['key']).read() == T['secret']); escaped()",
    "etc": "must('root' in open('/etc/passwd').read()); escaped()",
    "store": "must(os.listdir(T['store'])); escaped()",
    "scratch of another": "must(open(T['other']).read()); escaped()",
    "open descriptors": """
for number in range(3, 1024):
    try:
        if T['secret'] in os.pread(number, 4096, 0).decode(errors='replace'):
            escaped()
    except OSError:
        pass
""",
    "descriptors in proc": """
for number in os.listdir(f'/proc/{T["pid"]}/fd'):
    try:
        if os.readlink(f'/proc/{T["pid"]}/fd/{number}') == T['key']:
            must(open(f'/proc/{T["pid"]}/fd/{number}').read() == T['secret'])
            escaped()
    except OSError:
        pass
""",
    "root in proc": "must(open(f'/proc/{T[\"pid\"]}/root' + T['key']).read()); escaped()",
    "own root in proc": "must(open('/proc/self/root' + T['key']).read()); escaped()",
    "symbolic link": "os.symlink(T['key'], 'link'); must(open('link').read()); escaped()",
    "symbolic link of a folder": "os.symlink(T['store'], 'link'); must(os.listdir('link')); escaped()",
    "hard link": "l = T['folder'] + '/link'; os.link(T['key'], l); must(open(l).read()); escaped()",
    "parent folder": "must(os.listdir('..')); escaped()",
    "memory of another": """
own = ctypes.create_string_buffer(len(T['secret']))
class Part(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
here, there = Part(ctypes.addressof(own), len(own)), Part(T['address'], len(own))
must(C.process_vm_readv(T['pid'], ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == len(own))
must(own.raw.decode() == T['secret'])
escaped()
""",
    "memory in proc": "f = open(f'/proc/{T[\"pid\"]}/mem', 'rb', 0); f.seek(T['address'])\n"
    "must(f.read(len(T['secret'])).decode() == T['secret']); escaped()",
}
_WRITING = {
    "new file": "open(T['store'] + '/new', 'w').close(); escaped()",
    "append": "open(T['key'], 'a').close(); escaped()",
    "truncate": "os.truncate(T['key'], 0)",
    "removal": "os.unlink(T['key'])",
    "rename": "os.rename(T['key'], T['folder'] + '/taken')",
    "new folder": "os.mkdir(T['store'] + '/new'); escaped()",
    "mode": "os.chmod(T['key'], 0o777)",
    "times": "os.utime(T['key'], (1, 1))",
    "attribute": "os.setxattr(T['key'], 'user.mine', b'x'); escaped()",
    "shared memory file": "from multiprocessing.shared_memory import SharedMemory\n"
    "SharedMemory(create=True, size=4096).unlink(); escaped()",
    "link to write through": "os.symlink(T['key'], 'link'); open('link', 'a').close(); escaped()",
}
_PROCESSES = {
    "fork": "os.fork() or escaped(); os.wait(); time.sleep(0.2)",
    "vfork": "subprocess.run(['/bin/true'], check=True); escaped()",
    "exec": "os.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "clone": "must(C.syscall({clone}, 17, 0, 0, 0, 0) >= 0); escaped()",
    "clone3": "a = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17); must(C.syscall(435, a, 64) >= 0); escaped()",
    "fork bomb": """
for _ in range(100):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
escaped()
""",
    "threads": """
threading.stack_size(65536)
for _ in range(2000):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
time.sleep(0.3)
escaped()
""",
    "process left behind": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        open(T['store'] + '/left', 'w').close()
    os._exit(0)
os.wait()
""",
}
_OTHERS = {
    "signal": "os.kill(T['pid'], signal.SIGUSR1)",
    "signal to the group": "s = signal.SIGUSR1; signal.signal(s, signal.SIG_IGN); os.killpg(T['group'], s)",
    "signal through a descriptor": "signal.pidfd_send_signal(os.pidfd_open(T['pid']), signal.SIGUSR1)",
    "signal by input": """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, T['pid'])
fcntl.fcntl(r, 10, signal.SIGUSR1)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b'x')
""",
    "ptrace": "must(C.ptrace(0x4206, T['pid'], 0, 0) == 0); escaped()",
    "limits of another": "resource.prlimit(T['pid'], resource.RLIMIT_CORE, (0, 0))",
    "priority of another": "os.setpriority(os.PRIO_PROCESS, T['pid'], 19)",
    "cores of another": "os.sched_setaffinity(T['pid'], [min(os.sched_getaffinity(0))])",
}
_SPACE = {
    "disk": """
for number in range(6):
    with open(f'file{number}', 'wb') as file:
        for _ in range(60):
            file.write(bytes(2**20))
escaped()
""",
    "disk of removed files": """
files = []
for number in range(6):
    files.append(open('file', 'wb', 0))
    os.unlink('file')
    for _ in range(60):
        files[-1].write(bytes(2**20))
escaped()
""",
    "disk by allocation": "f = open('file', 'wb'); os.posix_fallocate(f.fileno(), 0, 2**28); escaped()",
    "output": "for _ in range(100): sys.stdout.write('x' * 2**20)\nsys.stdout.flush(); escaped()",
    "inodes": "for n in range(20000): open(f'file{n}', 'w').close()\nescaped()",
    "memory": "x = bytearray(3 * 2**29); escaped()",
    "memory of a file": "f = os.memfd_create('x'); must(os.write(f, bytes(2**20)) == 2**20); escaped()",
    "memory of System V": "must(C.shmget(0, 2**20, 0o1600) >= 0); escaped()",
}
_OF_ROOT = {
    "mount namespace": "must(C.unshare(0x20000) == 0); escaped()",
    "device": "os.mknod('null', 0o666 | stat.S_IFCHR, os.makedev(1, 3)); escaped()",
    "library": "open(os.__file__, 'a').close(); escaped()",
    "chroot": "os.chroot(T['store']); escaped()",
    "user": "os.setuid(12345); escaped()",
    "host name": "socket.sethostname(socket.gethostname()); escaped()",
    "owner": "os.chown(T['key'], 12345, 12345)",
}
CLONE = {"x86_64": "56", "aarch64": "220"}[os.uname().machine]
ATTACKS = {
    name: PRELUDE + program.replace("{clone}", CLONE)
    for group in (_NETWORK, _READING, _WRITING, _PROCESSES, _OTHERS, _SPACE)
    for name, program in group.items()
}
ATTACKS_OF_ROOT = {name: PRELUDE + program for name, program in _OF_ROOT.items()}
