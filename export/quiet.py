"""transformers without its own log and progress bars: the commands report by themselves."""

import os


def import_quietly() -> None:
    """Import transformers and silence it. ModuleNotFoundError where it is not installed."""
    os.environ["TQDM_DISABLE"] = "1"  # read at import; transformers' own switch leaves out the bar of GGUF files
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
