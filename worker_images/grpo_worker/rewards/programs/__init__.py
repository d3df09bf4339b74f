"""Untrusted programs, confined by the kernel: Landlock, seccomp, limits, and namespaces where permitted.

Uses only the standard library, because the process that starts programs lacks the job's packages.
"""
