"""`dspark generate`: answer one prompt."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from dspark.errors import UsageError
from dspark.tools.options import THROUGHPUT, add_engine, add_sampling, sampling_options

USELESS_ROUNDS = 16  # without an accepted draft, from which on it is no chance


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="answer a prompt",
        description="Answer a prompt, speculatively or plainly, greedily or by sampling. Text goes to stdout as it is"
        " certain.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text; - reads stdin")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--mode",
        choices=("speculative", "plain", "strict"),
        default="speculative",
        help="plain: no drafts; strict: drafts, but the target runs one token at a time; default %(default)s",
    )
    add_sampling(parser)
    parser.add_argument(
        "--sampling",
        choices=("exact", "coupled", "opportunistic"),
        help="rule at a temperature above 0: exact and coupled give the target's distribution, coupled the very text of"
        " plain decoding with this seed; opportunistic is faster and NOT exact; default: coupled",
    )
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end the answer before this text")
    parser.add_argument("--stop-token-id", metavar="ID", type=int, action="append", default=[])
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and of the N likeliest"
    )
    parser.add_argument(
        "--pause-below",
        type=float,
        metavar="RATE",
        help="pause drafting while fewer drafts than this are accepted (0..1)",
    )
    parser.add_argument(
        "--scheduler",
        choices=("off", "threshold", *THROUGHPUT),
        help="which drafts are verified; throughput: those that pay at the speeds that dspark profile measured, and"
        " variants (docs/scheduling.md); default: threshold if one is given, else the sampling rule's own",
    )
    parser.add_argument(
        "--confidence-threshold", type=float, metavar="θ", help="verify up to the first draft below it (0..1; 0: all)"
    )
    parser.add_argument("--draft-len", type=int, metavar="N", help="drafts per round; default: the bundle's")
    parser.add_argument("--prefill-chunk", type=int, default=512, metavar="N", help="prompt tokens per target forward")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at stop tokens")
    add_engine(parser)
    parser.add_argument("--trace", metavar="FILE", help="write one JSON line per round")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")


def run(args: argparse.Namespace) -> int:
    from dspark.runtime import load
    from dspark.runtime.trace import tracer

    text = _prompt(args)
    if args.trace is not None:
        _check_trace(args)
    decoder = load(args.bundle, backend=args.backend, threads=args.threads)
    options = {
        "max_new_tokens": args.max_new_tokens,
        "mode": args.mode,
        "sampling": args.sampling,
        **sampling_options(args),
        "stop": args.stop,
        "stop_token_ids": args.stop_token_id,
        "logprobs": args.logprobs,
        "pause_below": args.pause_below,
        "scheduler": args.scheduler,
        "confidence_threshold": args.confidence_threshold,
        "draft_len": args.draft_len,
        "prefill_chunk": args.prefill_chunk,
        "ignore_eos": args.ignore_eos,
        # A trace is for looking at confidences, whether or not the scheduler does.
        "read_confidence": args.trace is not None,
    }
    prompt = [{"role": "user", "content": text}] if args.chat else text
    generation = None
    with contextlib.ExitStack() as files:
        # The stream is asked for first: a refused option must not leave an empty trace behind.
        stream, trace = decoder.stream(prompt, **options), None
        if args.trace is not None:
            try:
                trace = tracer(files.enter_context(open(args.trace, "w", encoding="utf-8")))
            except OSError as error:
                raise UsageError(f"{args.trace}: cannot write the trace ({error.strerror})") from error
        for chunk in stream:
            generation = chunk.generation
            if trace is not None and chunk.round is not None:
                trace(chunk.round)
            if not args.json:
                print(chunk.text, end="", flush=True)
    assert generation is not None
    if args.json:
        print(json.dumps(generation.to_json(), ensure_ascii=False))
    else:
        print()
        print(_summary(generation), file=sys.stderr)
    warning = _warning(generation.stats) if args.mode == "speculative" else None
    if warning:
        print(f"dspark generate: warning: {warning}", file=sys.stderr)
    return 0


def _check_trace(args: argparse.Namespace) -> None:
    """Refuse a trace that would overwrite what the command reads."""
    trace, bundle = Path(args.trace).resolve(), Path(args.bundle).resolve()
    if trace.is_relative_to(bundle):
        raise UsageError(f"--trace {args.trace}: is in the bundle; name a file elsewhere")
    if args.prompt_file and trace == Path(args.prompt_file).resolve():
        raise UsageError(f"--trace {args.trace}: is the prompt file; name another one")


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        text, where = args.prompt, "--prompt"
    else:
        where = args.prompt_file
        try:
            text = sys.stdin.read() if where == "-" else Path(where).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{where}: cannot read the prompt ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: the prompt is not UTF-8 text (byte {error.start})") from error
    if not text:
        raise UsageError(f"{where}: the prompt is empty")
    return text


def _warning(stats) -> str | None:
    """A drafter that is of no use: the text is right all the same, so that nothing else would show it."""
    if stats.rounds > 1 and not stats.drafted:  # a single round may have had no room for a draft
        return f"the drafter proposed nothing in {stats.rounds} rounds; the text was decoded plainly"
    if stats.rounds >= USELESS_ROUNDS and not stats.verified:
        return f"no draft was verified in {stats.rounds} rounds; lower --confidence-threshold"
    if stats.rounds >= USELESS_ROUNDS and not stats.accepted:
        return (
            f"the target accepted none of {stats.verified} drafts in {stats.rounds} rounds: the drafter does not fit"
            " the target, or is untrained"
        )
    return None


def _summary(generation) -> str:
    stats = generation.stats
    parts = [f"{stats.emitted} tokens ({generation.finish_reason})", f"{stats.tokens_per_second:.1f} tokens/s"]
    if generation.seed is not None:
        parts.append(f"seed {generation.seed}")
    if stats.drafted:
        parts.append(f"{stats.acceptance_length:.2f} tokens per round")
        parts.append(f"{stats.accepted} of {stats.verified} verified drafts accepted")
    return ", ".join(parts)
