"""Many short requests through one batch, with cancellations and deadlines: nothing leaks, nothing crosses over."""

import asyncio
import gc
import random
import resource

import pytest

from dspark.runtime import AsyncBatch, QueueFull, load

PLACES, CLIENTS = 16, 24


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_soak(pairs, count):
    bundle = pairs("llama-rnn").bundle
    rng = random.Random(count)
    asked = [
        (rng.choices(range(256), k=rng.choice((1, 3, 20, 60))), rng.choice(({}, {"temperature": 0.9, "seed": seed})))
        for seed in range(25)
    ]
    alone = load(bundle, threads=1)
    options = {"max_new_tokens": 24, "ignore_eos": True}
    expected = [alone.generate(prompt, **options, **more).token_ids for prompt, more in asked]
    batch = load(bundle, threads=1, max_batch_size=PLACES).batch("threshold", confidence_threshold=0.5, max_queue=4)
    reasons: dict[str, int] = {}
    busiest = refused = 0
    memory = []

    async def one(front: AsyncBatch, number: int) -> None:
        """A request that is read to its end, left, cancelled by its task, or has little time."""
        nonlocal busiest, refused
        kind, tokens = number % len(asked), []
        prompt, more = asked[kind]
        how = rng.random()
        timeout = rng.choice((0.002, 0.02)) if how < 0.2 else None
        try:
            stream = front.stream(prompt, timeout=timeout, **options, **more)
        except QueueFull:
            refused += 1
            await asyncio.sleep(0.002)
            return await one(front, number)
        generation = None
        async for chunk in stream:
            busiest = max(busiest, batch.running)
            tokens += chunk.token_ids
            generation = chunk.generation
            if 0.2 <= how < 0.4 and rng.random() < 0.3:
                await stream.aclose()
                break
        reason = "left" if generation is None else generation.finish_reason
        reasons[reason] = reasons.get(reason, 0) + 1
        assert tokens == expected[kind][: len(tokens)], "another request's tokens"
        assert (len(tokens) == 24) == (reason == "length") or reason != "length"
        assert timeout is not None or reason in ("length", "left")

    async def main() -> None:
        numbers = iter(range(count))

        async def client(front: AsyncBatch) -> None:
            for number in numbers:
                await one(front, number)
                if number == count // 4 or number == count - 1:
                    gc.collect()
                    memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

        async with AsyncBatch(batch) as front:
            await asyncio.gather(*(client(front) for _ in range(CLIENTS)))
            while batch.running or batch.waiting:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert sum(reasons.values()) == count and set(reasons) == {"length", "left", "deadline"}
    counted = batch.counters.finished
    assert sum(counted.values()) == count and counted["length"] >= reasons["length"]
    assert sorted(batch._free) == list(range(PLACES)) and (batch.running, batch.waiting) == (0, 0)
    assert busiest == PLACES and refused > 0
    assert memory[-1] - memory[0] < 20, f"{memory} MiB at most, after a quarter and at the end"
    for (prompt, more), answer in zip(asked, expected, strict=True):  # places that were used and left in every way
        assert batch.submit(prompt, **options, **more).result().token_ids == answer
