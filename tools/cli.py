"""The `dspark` command. Each subcommand is a file of its own in commands/, which imports what is heavy when it runs."""

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

from dspark import __version__
from dspark.errors import DSparkError, UsageError, unexpected
from dspark.tools import commands


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong option is one line and not a page of usage."""

    def error(self, message: str):
        self.exit(UsageError.exit_code, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Every module of `commands` offers add_parser(subparsers) and run(args) -> exit code."""
    parser = Parser(prog="dspark", description="DSpark speculative decoding: run, inspect and measure bundles.")
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in sorted(info.name for info in pkgutil.iter_modules(commands.__path__)):
        importlib.import_module(f"{commands.__name__}.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit code: 0 success, 1 the check or the job failed, 2 wrong use."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the job
    args = build_parser().parse_args(argv)
    try:
        code = importlib.import_module(f"{commands.__name__}.{args.command}").run(args)
        sys.stdout.flush()
        return code
    except DSparkError as error:
        print(f"dspark {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        print(f"dspark {args.command}: error: {unexpected(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dspark {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
