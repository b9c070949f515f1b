"""The `dspark` command. Each subcommand is a file of its own in commands/, which imports what is heavy when it runs."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

from dspark import __version__
from dspark.command import Parser, run_command
from dspark.tools import commands


def build_parser() -> argparse.ArgumentParser:
    """Every module of `commands` offers add_parser(subparsers) and run(args) -> exit code."""
    parser = Parser(prog="dspark", description="DSpark speculative decoding: run, inspect and measure bundles.")
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in sorted(info.name for info in pkgutil.iter_modules(commands.__path__)):
        importlib.import_module(f"{commands.__name__}.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code: 0 success, 1 the check or the job failed, 2 wrong use, 128 + signal."""
    arguments = sys.argv[1:] if argv is None else list(argv)

    def run() -> int:
        args = build_parser().parse_args(arguments)
        return importlib.import_module(f"{commands.__name__}.{args.command}").run(args)

    return run_command(run, f"{' '.join(['dspark', *arguments[:1]])}: ", "--json" in arguments)


if __name__ == "__main__":
    sys.exit(main())
