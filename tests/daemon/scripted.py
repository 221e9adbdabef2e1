"""A service that plays a script in the place of scheduler and engine: tokens, pauses, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from stratad.errors import StrataError
from stratad.settings import Settings
from stratad.tokens import Tokens
from stratad.types import Done, EngineFacts, Event, GenRequest, Token

Step = Event | float | asyncio.Event | Exception
"""An event to yield, seconds to wait, something to wait for, or what goes wrong."""

IDENTITY = "0123456789abcdef0123456789abcdef"


class ScriptedGeneration:
    """One run of the script. It ends at `max_new` tokens, at the script's end, or when it is cancelled."""

    def __init__(self, request: GenRequest, steps: Sequence[Step]) -> None:
        self.request, self.steps = request, steps
        self.cancelled = asyncio.Event()
        self.tokens = 0
        self.ended = False

    async def cancel(self) -> None:
        self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        for step in self.steps:
            if self.cancelled.is_set():
                break
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float | asyncio.Event):
                await self._wait(step)
                continue
            yield step
            self.tokens += isinstance(step, Token)
            if isinstance(step, Done):
                return
            if self.tokens == self.request.max_new:
                yield self._done("length")
                return
        self.ended = True
        yield self._done("cancel" if self.cancelled.is_set() else "stop")

    async def _wait(self, step: float | asyncio.Event) -> None:
        cancelled = asyncio.ensure_future(self.cancelled.wait())
        other = asyncio.ensure_future(asyncio.sleep(step) if isinstance(step, float) else step.wait())
        try:
            await asyncio.wait([cancelled, other], return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelled.cancel()
            other.cancel()

    def _done(self, finish: str) -> Done:
        return Done(finish, self.tokens, len(self.request.prompt_ids), 3, 2.0, 10.0)  # type: ignore[arg-type]


class ScriptedService:
    """Implements `stratad.types.Service`. Set `steps`, `refusal`, `state` and `facts` as a test needs them."""

    def __init__(self, tokens: Tokens, settings: Settings | None = None) -> None:
        self.tokens = tokens
        self.settings = settings or Settings()
        self.facts: EngineFacts | None = EngineFacts(4096, {"identity": IDENTITY})
        self.state: dict[str, object] = {"state": "ready", "state_detail": "", "engine": {"load_percent": None}}
        self.steps: Sequence[Step] = self.say("Hello there.")
        self.refusal: StrataError | None = None
        self.generations: list[ScriptedGeneration] = []

    def submit(self, request: GenRequest) -> ScriptedGeneration:
        if self.refusal is not None:
            raise self.refusal
        self.generations.append(ScriptedGeneration(request, self.steps))
        return self.generations[-1]

    def status(self) -> dict[str, object]:
        return self.state

    def metrics(self) -> dict[str, object]:
        return {"live": {"slots": []}}

    def metrics_text(self) -> str:
        return "# HELP strata_x X.\n# TYPE strata_x gauge\nstrata_x 1\n"

    @property
    def last(self) -> GenRequest:
        """The request that came last."""
        return self.generations[-1].request

    def say(self, *pieces: str | bytes) -> list[Step]:
        """Tokens for texts (as the tokenizer cuts them) or bytes (one token each), then the end token."""
        ids = [token for piece in pieces for token in self._ids(piece)]
        return [*(Token(token) for token in ids), Token(8187)]

    def _ids(self, piece: str | bytes) -> list[int]:
        if isinstance(piece, str):
            return self.tokens.encode(piece)
        single = {self.tokens.token_bytes(token): token for token in range(self.tokens.size)}
        return [single[bytes([byte])] for byte in piece]
