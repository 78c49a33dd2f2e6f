"""A request while it is answered: its rows in the engine, and what they do, as it happens."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sequencematch.serving.jobs import Job, Update
from sequencematch.serving.plan import Plan
from sequencematch.serving.text import Event, Row


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Exchange:
    """The rows of a plan, submitted. Whoever makes one must call `close`, or leave its `async with`."""

    def __init__(self, plan: Plan) -> None:
        """Submit the plan's rows, all or none. Call it inside the event loop."""
        self.plan, self.started_at = plan, time.perf_counter()
        self._news: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._watching: asyncio.Task[None] | None = None
        speller = plan.served.speller
        owners = [prompt for prompt in plan.prompts for _ in range(plan.choices)]
        self.rows = [
            Row(speller, plan.sampling, prompt, plan.prefix, plan.stop, time.perf_counter) for prompt in owners
        ]
        self.jobs = [
            Job(
                [token.id for token in prompt],
                plan.sampling,
                self._deliver_to(index),
                [token.id for token in plan.prefix],
                row=index,
                alternatives=plan.alternatives,
                timeout_s=plan.timeout_s,
            )
            for index, prompt in enumerate(owners)
        ]
        plan.served.engine.submit(self.jobs)

    def _deliver_to(self, index: int) -> Callable[[Update], None]:
        def deliver(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._news.put_nowait, (index, update))

        return deliver

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """End `news` when the client closes the connection."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._news.put_nowait(None)

        self._watching = asyncio.create_task(wait())

    async def news(self) -> AsyncIterator[tuple[int, list[Event]]]:
        """Each row's actions as they happen, until all rows have ended."""
        left = set(range(len(self.rows)))
        while left:
            item = await self._news.get()
            if item is None:
                raise ClientGoneError
            index, update = item
            if index not in left:
                continue
            if update.error is not None:
                raise update.error
            row = self.rows[index]
            events = row.take(update.actions)
            if row.finish_reason is not None:
                left.discard(index)
                self.plan.served.engine.cancel(self.jobs[index])
            assert row.finish_reason is not None or not update.ended
            yield index, events

    def close(self) -> None:
        """Cancel what still runs."""
        if self._watching is not None:
            self._watching.cancel()
        for job in self.jobs:
            self.plan.served.engine.cancel(job)

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's usage, with actions and deletions."""
        prompt = sum(len(tokens) for tokens in self.plan.prompts)
        new = sum(row.new_tokens for row in self.rows)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "actions": sum(row.actions for row in self.rows),
            "deletions": sum(row.deletions for row in self.rows),
        }
