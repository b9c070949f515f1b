"""A real pair whose drafter's proposals come from elsewhere."""

from collections.abc import Callable

import numpy as np

from dspark.runtime import Decoder


class Proposing:
    """An engine whose drafts are replaced: propose(position of the first, count) -> tokens."""

    def __init__(self, engine, propose: Callable):
        self.engine, self.propose, self.owners = engine, propose, {}

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run(self, inputs, fetch):
        outputs = dict(self.engine.run(inputs, fetch))
        if "draft_tokens" in fetch:
            first, count = int(inputs["positions"][0, 0]) + 1, inputs["tokens"].shape[1]
            outputs["draft_tokens"] = np.array([self.propose(first, count)])
        return outputs


def proposing(decoder: Decoder, propose: Callable) -> Decoder:
    engine, tokens = Proposing(decoder.drafter_engine, propose), decoder.vocabulary.tokens
    return Decoder(decoder.manifest, decoder.target_engine, engine, decoder.tokenizer, decoder.context_limit, tokens)
