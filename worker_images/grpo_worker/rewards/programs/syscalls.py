"""Numbers of system calls, from the headers of Linux, as name=x86-64/arm64."""

import platform

# What an interpreter, its threads and its event loops need. None of them reaches another process or the
# network, creates a process, or changes the owner, mode or times of a file.
_ALLOWED = """
    read=0/63 write=1/64 readv=19/65 writev=20/66 pread64=17/67 pwrite64=18/68 preadv=295/69
    pwritev=296/70 preadv2=327/286 pwritev2=328/287 open=2/ openat=257/56 creat=85/ close=3/57
    close_range=436/436 stat=4/ fstat=5/80 lstat=6/ newfstatat=262/79 statx=332/291 statfs=137/43
    fstatfs=138/44 access=21/ faccessat=269/48 faccessat2=439/439 lseek=8/62 mmap=9/222
    munmap=11/215 mremap=25/216 mprotect=10/226 madvise=28/233 brk=12/214 mincore=27/232
    msync=26/227 dup=32/23 dup2=33/ dup3=292/24 pipe=22/ pipe2=293/59 poll=7/ ppoll=271/73
    select=23/ pselect6=270/72 epoll_create=213/ epoll_create1=291/20 epoll_ctl=233/21
    epoll_wait=232/ epoll_pwait=281/22 epoll_pwait2=441/441 eventfd=284/ eventfd2=290/19
    getdents=78/ getdents64=217/61 getcwd=79/17 chdir=80/49 fchdir=81/50 mkdir=83/ mkdirat=258/34
    rmdir=84/ unlink=87/ unlinkat=263/35 rename=82/ renameat=264/38 renameat2=316/276 link=86/
    linkat=265/37 symlink=88/ symlinkat=266/36 readlink=89/ readlinkat=267/78 ftruncate=77/46
    umask=95/166 fsync=74/82 fdatasync=75/83 flock=73/32 sendfile=40/71 copy_file_range=326/285
    fadvise64=221/223 readahead=187/213 futex=202/98 futex_waitv=449/449 set_robust_list=273/99
    get_robust_list=274/100 rseq=334/293 set_tid_address=218/96 membarrier=324/283
    sched_yield=24/124 sched_getaffinity=204/123 sched_getparam=143/121 sched_getscheduler=145/120
    sched_get_priority_max=146/125 sched_get_priority_min=147/126 sched_rr_get_interval=148/127
    getcpu=309/168 rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139
    rt_sigpending=127/136 rt_sigsuspend=130/133 rt_sigtimedwait=128/137 sigaltstack=131/132
    pause=34/ restart_syscall=219/128 nanosleep=35/101 clock_nanosleep=230/115 clock_gettime=228/113
    clock_getres=229/114 gettimeofday=96/169 time=201/ times=100/153 getitimer=36/102
    setitimer=38/103 alarm=37/ timer_create=222/107 timer_settime=223/110 timer_gettime=224/108
    timer_delete=226/111 timer_getoverrun=225/109 timerfd_create=283/85 timerfd_settime=286/86
    timerfd_gettime=287/87 getpid=39/172 gettid=186/178 getppid=110/173 getuid=102/174
    geteuid=107/175 getgid=104/176 getegid=108/177 getresuid=118/148 getresgid=120/150
    getgroups=115/158 getpgrp=111/ getpgid=121/155 getsid=124/156 capget=125/90 getrusage=98/165
    sysinfo=99/179 uname=63/160 getrandom=318/278 getpriority=140/141 getrlimit=97/163 exit=60/93
    exit_group=231/94 wait4=61/260 waitid=247/95 arch_prctl=158/ shutdown=48/210 getsockname=51/204
    getpeername=52/205 getsockopt=55/209 recvfrom=45/207
"""
# What the filter judges by its arguments, or answers itself.
_JUDGED = """
    clone=56/220 clone3=435/435 openat2=437/437 kill=62/129 tgkill=234/131 prctl=157/167 ioctl=16/29
    fcntl=72/25 prlimit64=302/261 setrlimit=160/164 socketpair=53/199 sendto=44/206 chmod=90/
    fchmod=91/52 fchmodat=268/53 fchmodat2=452/452 utime=132/ utimes=235/ futimesat=261/
    utimensat=280/88 setxattr=188/5 lsetxattr=189/6 fsetxattr=190/7 getxattr=191/8 lgetxattr=192/9
    fgetxattr=193/10 listxattr=194/11 llistxattr=195/12 flistxattr=196/13
"""
# What a process calls to confine itself.
_CONFINING = """
    capset=126/91 seccomp=317/277 landlock_create_ruleset=444/444 landlock_add_rule=445/445
    landlock_restrict_self=446/446
"""
# AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _numbers(table: str, column: int) -> dict[str, int]:
    entries = (entry.partition("=") for entry in table.split())
    found = ((name, numbers.split("/")[column]) for name, _, numbers in entries)
    return {name: int(number) for name, number in found if number}


_COLUMN, ARCHITECTURE = _ARCHITECTURES.get(platform.machine(), (0, 0))
"""ARCHITECTURE: the kernel's number of this processor's calls, 0 if the filter does not know them."""
ALLOWED = _numbers(_ALLOWED, _COLUMN)
JUDGED = _numbers(_JUDGED, _COLUMN)
CONFINING = _numbers(_CONFINING, _COLUMN)
