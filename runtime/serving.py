"""A batch for services on asyncio: `await` an answer, `async for` over its chunks. A thread steps the batch."""

import asyncio
import threading
import weakref
from typing import Self

from dspark.errors import DSparkError, UsageError
from dspark.runtime.batch import Batch, Request
from dspark.runtime.request import Chunk, Generation, Prompt, log


class AsyncBatch:
    """Use it as `async with AsyncBatch(decoder.batch()) as batch: ...`; leaving that ends all requests."""

    def __init__(self, batch: Batch):
        if not isinstance(batch, Batch):
            raise UsageError(f"AsyncBatch takes a batch, not a {type(batch).__name__}: AsyncBatch(decoder.batch())")
        self.batch = batch
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="dspark-batch", daemon=True)

    async def __aenter__(self) -> Self:
        if self._thread.ident is not None:
            raise UsageError("an AsyncBatch is entered once: make another one of its batch")
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

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options) -> "Stream":
        """Submit now, and give the chunks as they come; a stream that is dropped or closed cancels its request."""
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Chunk]()

        def deliver(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise DSparkError("the batch is closed: submit within `async with AsyncBatch(...)`")
            request = self.batch.submit(prompt, timeout=timeout, deliver=deliver, **options)
            self._wake.notify()
        return Stream(request, chunks)

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


class Stream:
    """The chunks of a request, for `async for`."""

    def __init__(self, request: Request, chunks: "asyncio.Queue[Chunk]"):
        self._chunks, self._ended = chunks, False
        self._cancel = weakref.finalize(self, request.cancel)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            chunk = await self._chunks.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._ended = chunk.generation is not None
        return chunk

    async def aclose(self) -> None:
        """Cancel the request, if it has not ended."""
        self._ended = True
        self._cancel()
