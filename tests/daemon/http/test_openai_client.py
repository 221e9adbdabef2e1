"""The official client, unchanged, against the service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.daemon.http.conftest import Server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client, without retries."""
    made = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10)
    yield made
    await made.close()


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello there."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].choices == []


async def test_completions_and_models(client: openai.AsyncOpenAI) -> None:
    assert (await client.completions.create(model="any", prompt="hi")).choices[0].text == "Hello there."
    assert [entry.id async for entry in client.models.list()] == ["strata-tiny-moe-Q4_0"]


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be a number") as caught:
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], temperature=-1)
    assert caught.value.param == "temperature"
