"""The async front, on fakes."""

import asyncio
import time

import pytest
from fakes import Language, fake_decoder, right_for

from dspark.errors import DSparkError, UsageError
from dspark.runtime import AsyncBatch, QueueFull

LANGUAGE = Language(4)


def make(requests: int = 3, **options):
    decoder = fake_decoder(LANGUAGE, right_for(LANGUAGE, lambda at: at % 6), requests=requests)
    return decoder.batch("off", **options)


def test_many_at_once():
    async def main():
        async with AsyncBatch(make()) as batch:
            asked = [batch.generate([1, r], max_new_tokens=10 + r) for r in range(12)]
            return [generation.token_ids for generation in await asyncio.gather(*asked)]

    assert asyncio.run(main()) == [LANGUAGE.continuation([1, r], 10 + r) for r in range(12)]


def test_streaming():
    async def main():
        chunks = []
        async with AsyncBatch(make()) as batch:
            other = asyncio.create_task(batch.generate([1, 3], max_new_tokens=20))
            async for chunk in batch.stream([1, 2], max_new_tokens=20):
                chunks.append(chunk)
            return chunks, await other

    chunks, other = asyncio.run(main())
    assert [t for chunk in chunks for t in chunk.token_ids] == LANGUAGE.continuation([1, 2], 20)
    assert chunks[-1].generation.finish_reason == "length" and len(chunks) > 4
    assert other.token_ids == LANGUAGE.continuation([1, 3], 20)


def slowly(batch, seconds: float = 0.005):
    """A step of the target takes a while, so that something can happen meanwhile."""
    run = batch.decoder.target_engine.run
    batch.decoder.target_engine.run = lambda *given: (time.sleep(seconds), run(*given))[1]
    return batch


def test_a_task_that_is_cancelled_cancels_its_request():
    async def main():
        batch = slowly(make(1))
        async with AsyncBatch(batch) as front:
            task = asyncio.create_task(front.generate([1, 2], max_new_tokens=190))
            while not batch.running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await front.generate([1, 3], max_new_tokens=5)).token_ids == LANGUAGE.continuation([1, 3], 5)
        return batch.counters.finished

    assert asyncio.run(main()) == {"cancelled": 1, "length": 1}


def test_an_iteration_that_is_left_cancels_its_request():
    async def main():
        batch = slowly(make(1))
        async with AsyncBatch(batch) as front:
            stream = front.stream([1, 2], max_new_tokens=190)
            async for _ in stream:
                break
            await stream.aclose()
            await front.generate([1, 3], max_new_tokens=5)
        return batch.counters.finished

    assert asyncio.run(main()) == {"cancelled": 1, "length": 1}


@pytest.mark.parametrize("how", ["closed", "dropped", "cancelled"])
def test_a_stream_that_is_left_before_its_first_chunk_cancels_its_request(how):
    async def main():
        batch = slowly(make(1))
        async with AsyncBatch(batch) as front:
            stream = front.stream([1, 2], max_new_tokens=190)
            if how == "closed":
                await stream.aclose()
            elif how == "cancelled":
                reader = asyncio.create_task(stream.__anext__())
                await asyncio.sleep(0)
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            del stream
            if how == "cancelled":
                del reader
            await front.generate([1, 3], max_new_tokens=5)
        return batch.counters.finished

    assert asyncio.run(main()) == {"cancelled": 1, "length": 1}


def test_it_is_entered_once():
    async def main():
        front = AsyncBatch(make())
        async with front:
            pass
        with pytest.raises(UsageError, match="entered once"):
            async with front:
                pass
        with pytest.raises(UsageError, match="takes a batch, not a Decoder"):
            AsyncBatch(fake_decoder(LANGUAGE))

    asyncio.run(main())


def test_leaving_ends_all_and_nothing_more_is_taken():
    async def main():
        batch = slowly(make(1))
        async with AsyncBatch(batch) as front:
            tasks = [asyncio.create_task(front.generate([1, r], max_new_tokens=190)) for r in range(3)]
            while not batch.running:
                await asyncio.sleep(0.001)
        with pytest.raises(DSparkError, match="the batch is closed"):
            await front.generate([1], max_new_tokens=3)
        return [generation.finish_reason for generation in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == ["cancelled"] * 3


def test_deadlines_and_refusals_reach_the_caller():
    async def main():
        batch = slowly(make(1, max_queue=1), 0.05)
        async with AsyncBatch(batch) as front:
            late = asyncio.create_task(front.generate([1, 2], max_new_tokens=190, timeout=0.12))
            while not batch.running:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(front.generate([1, 3], max_new_tokens=3))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull, match="try again later"):
                await front.generate([1, 4])
            with pytest.raises(UsageError, match="the prompt is empty"):
                await front.generate([])
            return await late, await waiting

    late, waiting = asyncio.run(main())
    assert late.finish_reason == "deadline" and waiting.token_ids == LANGUAGE.continuation([1, 3], 3)


def test_a_batch_that_stops_ends_its_requests(caplog):
    """A fault of ours, as the fakes find them, must leave nobody waiting."""

    async def main():
        batch = make(1)

        def broken(*_):
            raise AssertionError("a fault")

        batch.decoder.target_engine.run = broken
        async with AsyncBatch(batch) as front:
            tasks = [asyncio.create_task(front.generate([1, r], max_new_tokens=5)) for r in range(2)]
            found = [generation.finish_reason for generation in await asyncio.gather(*tasks)]
            with pytest.raises(DSparkError, match="the batch is closed"):
                await front.generate([1])
        return found

    assert asyncio.run(main()) == ["error", "cancelled"] and "the batch stopped" in caplog.text
