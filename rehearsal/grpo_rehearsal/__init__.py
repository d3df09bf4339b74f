"""Rehearsal of a job: the real controller on virtual time, against stand-in ranks and engines."""
