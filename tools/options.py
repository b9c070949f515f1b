"""Options that several commands have, each said once."""

import argparse

THROUGHPUT = ("throughput", "throughput-async", "throughput-global")  # schedulers that need a profile


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options of `dspark.runtime.load`."""
    parser.add_argument(
        "--backend",
        default="onnxruntime",
        metavar="NAME",
        help="onnxruntime (default, CPU), tensorrt or tensorrt-rtx",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")


SAMPLING = {  # option: (type, metavar, help)
    "temperature": (float, "T", "0 (default): greedy"),
    "top-k": (int, "K", "keep the K likeliest tokens; 0 (default): all"),
    "top-p": (float, "P", "keep the fewest likeliest that have P together; 1 (default): all"),
    "min-p": (float, "P", "keep what has P times the likeliest one's probability; 0 (default): all"),
    "repetition-penalty": (float, "X", "of all tokens so far; 1 (default): none"),
    "presence-penalty": (float, "X", "of tokens in the answer; 0 (default): none"),
    "frequency-penalty": (float, "X", "likewise, for each time; 0 (default): none"),
    "draft-temperature": (float, "T", "that drafts are drawn at; 0: argmax; default: the sampling rule's own"),
    "seed": (int, "N", "of the random numbers; default: a fresh one, which --json tells"),
}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options that say how tokens are drawn."""
    for name, (kind, metavar, text) in SAMPLING.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)


def sampling_options(args: argparse.Namespace) -> dict:
    """Those of `add_sampling` that were given, as `Options` fields."""
    names = [name.replace("-", "_") for name in SAMPLING]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
