"""Errors that a user can act on. The command line prints one as a single line and exits with its code."""

import os


class DSparkError(Exception):
    """One line: what is wrong, where, and what to do. `exit_code` 1: the check or the job failed."""

    exit_code = 1


class UsageError(DSparkError):
    """The input or the options cannot be used (exit code 2): bad checkpoint, bad bundle, bad option."""

    exit_code = 2


def unexpected(error: Exception) -> str:
    """The line for an error that nobody foresaw: most likely a fault in an input that a library choked on.

    With DSPARK_TRACEBACK set in the environment the error is raised again instead, for a report.
    """
    if os.environ.get("DSPARK_TRACEBACK"):
        raise error
    reason = str(error).strip().splitlines()
    first = f": {reason[0][:300]}" if reason else ""
    return f"unexpected {type(error).__name__}{first}; check the input, DSPARK_TRACEBACK=1 shows where it arose"
