"""`dspark train`: train a drafter for a target from prompts; the target itself writes the training texts."""

import argparse
import json
import sys
from pathlib import Path

from dspark.errors import DSparkError, UsageError

HEADS = ("vanilla", "gated", "rnn", "none")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a drafter for a target",
        description="Train a drafter for a target in three parts, each resumed where an interrupted run stopped: the "
        "target answers the prompts, its hidden states are stored, the drafter learns from them. A GPU is used "
        "if there is one. Writes a checkpoint folder that `dspark-export --ckpt` takes.",
    )
    parser.add_argument(
        "--target", required=True, metavar="DIR|ID|demo", help="model folder, GGUF file, hub id or demo"
    )
    parser.add_argument("--prompts", required=True, type=Path, metavar="F", help='JSON lines {"prompt", "kind", "id"}')
    parser.add_argument("--heldout", type=Path, metavar="F", help="prompts to report acceptance on, never trained on")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="checkpoint folder to write")
    parser.add_argument("--work", type=Path, metavar="DIR", help="intermediate files, shared between runs (OUT.work)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")

    drafter = parser.add_argument_group("drafter")
    drafter.add_argument("--layers", type=int, default=2, metavar="L", help="decoder layers (2)")
    drafter.add_argument("--block-size", type=int, default=7, metavar="N", help="tokens drafted in a round (7)")
    drafter.add_argument("--taps", type=_ids, metavar="I,J", help="target layers whose outputs are read (five, even)")
    drafter.add_argument("--markov-head", choices=HEADS, default="vanilla", help="none: a DFlash drafter (vanilla)")
    drafter.add_argument("--markov-rank", type=int, default=64, metavar="R", help="rank of the Markov head (64)")
    drafter.add_argument("--draft-vocab-size", type=int, metavar="N", help="most frequent tokens to propose (all)")
    drafter.add_argument(
        "--mask-token-id",
        type=int,
        metavar="I",
        help="token that stands for every draft that is still to be found, behind the anchor; take one that no text "
        "uses, such as a reserved token of the tokenizer (the tokenizer's mask token, if it has one)",
    )

    recipe = parser.add_argument_group("recipe")
    recipe.add_argument(
        "--objective", choices=("dspark", "dflash"), default="dspark", help="dflash: cross-entropy alone (dspark)"
    )
    recipe.add_argument("--start-from", type=Path, metavar="DIR", help="a drafter to go on from (the target's layers)")
    recipe.add_argument("--steps", type=int, default=5000, metavar="N", help="optimizer steps (5000)")
    recipe.add_argument("--texts", type=int, default=8, metavar="N", help="texts of a step (8)")
    recipe.add_argument("--anchors", type=int, default=32, metavar="N", help="random anchors in each text (32)")
    recipe.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="peak rate of AdamW (0.001)")
    recipe.add_argument("--max-new-tokens", type=int, default=192, metavar="N", help="length of a response (192)")
    recipe.add_argument("--seed", type=int, default=0, help="of weights and of drawn anchors (0)")
    recipe.add_argument("--threads", type=int, metavar="N", help="CPU threads (torch's choice)")


def run(args: argparse.Namespace) -> int:
    """Train and report; the exit code. UsageError and DSparkError as `run_training` raises them."""
    for option in ("layers", "block_size", "markov_rank", "steps", "texts", "anchors", "max_new_tokens", "threads"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option.replace('_', '-')}: {value} is not a positive number")
    if not args.learning_rate > 0:
        raise UsageError(f"--learning-rate: {args.learning_rate} is not a positive number")
    try:
        from dspark.export.quiet import import_quietly

        import_quietly()  # before anything that imports transformers or tqdm, as torch does
        import torch

        from dspark.tools.training.batches import Recipe
        from dspark.tools.training.pipeline import Job, run_training
        from dspark.tools.training.progress import Heartbeat
    except ModuleNotFoundError as error:
        raise DSparkError(f"package {error.name!r} is not installed; run `pip install '.[export]'`") from error
    if args.threads:
        torch.set_num_threads(args.threads)
    job = Job(
        target=args.target,
        prompts=args.prompts,
        heldout=args.heldout,
        out=args.out,
        work=args.work or args.out.with_name(args.out.name + ".work"),
        layers=args.layers,
        block_size=args.block_size,
        target_layer_ids=args.taps,
        draft_vocab_size=args.draft_vocab_size,
        mask_token_id=args.mask_token_id,
        markov_head=args.markov_head,
        markov_rank=args.markov_rank,
        max_new_tokens=args.max_new_tokens,
        start_from=args.start_from,
        recipe=Recipe(
            steps=args.steps,
            texts=args.texts,
            anchors=args.anchors,
            learning_rate=args.learning_rate,
            objective=args.objective,
            seed=args.seed,
        ),
    )
    try:
        with Heartbeat(lambda line: print(line, file=sys.stderr, flush=True)) as log:
            result = run_training(job, log)
    except OSError as error:
        where, why = error.filename or job.work, error.strerror or error
        raise DSparkError(f"{where}: {why}; mend that and run the same command again, it resumes") from error
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['out']}: {result['steps']} steps, {result['parameters']:,} trained parameters")
        for kind, figures in result["heldout"].items():
            per_position = " ".join(f"{rate:.2f}" for rate in figures["per_position"])
            print(
                f"  held-out {kind}: acceptance length {figures['acceptance_length']:.2f}, by position {per_position}"
            )
    return 0


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer ids such as 1,8,15") from None
