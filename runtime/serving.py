"""A batch for services on asyncio: `await` an answer, `async for` over its chunks. A thread steps the batch."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Self

from dspark.errors import DSparkError
from dspark.runtime.batch import Batch, Request
from dspark.runtime.request import Chunk, Generation, Prompt, log


class AsyncBatch:
    """Use it as `async with AsyncBatch(decoder.batch()) as batch: ...`; leaving that ends all requests."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="dspark-batch", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_exception) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options) -> Generation:
        """Answer one prompt. Arguments and errors as for `Batch.submit`; cancelling the task cancels the request."""
        generation = None
        async for chunk in self.stream(prompt, timeout=timeout, **options):
            generation = chunk.generation
        assert generation is not None
        return generation

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options) -> AsyncIterator[Chunk]:
        """Submit now, and give the chunks as they come; an iteration that is left early cancels the request."""
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Chunk]()

        def deliver(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise DSparkError("the batch is closed: submit within `async with AsyncBatch(...)`")
            request = self.batch.submit(prompt, timeout=timeout, deliver=deliver, **options)
            self._wake.notify()
        return _read(request, chunks)

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closing or self.batch.waiting or self.batch.running)
                    if self._closing:
                        break
                self.batch.step()
        except BaseException:  # a fault, or the end of the process: nobody is left waiting
            log.exception("the batch stopped")
        finally:
            with self._wake:
                self._closing = True
                self.batch.close()


async def _read(request: Request, chunks: "asyncio.Queue[Chunk]") -> AsyncIterator[Chunk]:
    try:
        while True:
            chunk = await chunks.get()
            yield chunk
            if chunk.generation is not None:
                return
    finally:
        request.cancel()
