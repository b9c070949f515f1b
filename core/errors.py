"""Errors that a user can act on. The command line prints one as a single line and exits with its code."""


class DSparkError(Exception):
    """One line: what is wrong, where, and what to do. `exit_code` 1: the check or the job failed."""

    exit_code = 1


class UsageError(DSparkError):
    """The input or the options cannot be used (exit code 2): bad checkpoint, bad bundle, bad option."""

    exit_code = 2
