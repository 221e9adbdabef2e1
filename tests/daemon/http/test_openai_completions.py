"""Completions: raw prompts, their shapes and logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from stratad.types import Token

from tests.daemon.http.conftest import Server


async def test_a_whole_completion(server: Server) -> None:
    body = (await server.complete()).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello there.", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == len(server.service.tokens.encode("hi"))


async def test_a_streamed_completion(server: Server) -> None:
    events = await server.stream("/v1/completions", prompt="hi", stream_options={"include_usage": True})
    *texts, last, usage, done = events
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in texts) == "Hello there."  # type: ignore[index]
    assert isinstance(last, dict) and last["choices"][0]["finish_reason"] == "stop"
    assert isinstance(usage, dict) and (usage["choices"], usage["object"]) == ([], "text_completion")


async def test_control_tokens_in_a_raw_prompt_are_control_tokens(server: Server) -> None:
    await server.complete(prompt="<|im_start|>user")
    assert server.service.last.prompt_ids[0] == 8186


@pytest.mark.parametrize("prompt", [[8186, 284, 198], [[8186, 284, 198]]])
async def test_token_ids_go_in_as_they_are(server: Server, prompt: Any) -> None:
    await server.complete(prompt=prompt)
    assert server.service.last.prompt_ids == (8186, 284, 198)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "must be a string or a list of token ids"),
        (3, "must be a string or a list of token ids"),
        ("", "must have at least one token"),
        ([], "must have at least one token"),
        ([[]], "must have at least one token"),
        ([1, "a"], "must be a string or a list of token ids"),
        ([True], "must be a string or a list of token ids"),
        (["a", "b"], "must be one prompt a request"),
        ([8192], "must hold token ids from 0 to 8191, not 8192"),
        ([-1], "must hold token ids from 0 to 8191, not -1"),
    ],
)
async def test_wrong_prompts(server: Server, prompt: Any, words: str) -> None:
    response = await server.complete(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"logprobs": True}, {"logprobs": 21}]
)
async def test_what_is_not_done_is_refused(server: Server, fields: dict[str, Any]) -> None:
    response = await server.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))


async def test_logprobs_are_columns(server: Server) -> None:
    ids = server.service.tokens.encode("Hi there")
    server.service.steps = [*(Token(token, -0.25, ((token, -0.25),)) for token in ids), Token(8187, -0.1)]
    columns = (await server.complete(logprobs=1)).json()["choices"][0]["logprobs"]
    assert server.service.last.sampling.logprobs == 1
    assert "".join(columns["tokens"]) == "Hi there"
    assert columns["token_logprobs"] == [-0.25] * len(ids)
    assert columns["top_logprobs"][0] == {columns["tokens"][0]: -0.25}
    starts = [sum(len(text) for text in columns["tokens"][:i]) for i in range(len(ids))]
    assert columns["text_offset"] == starts
    events = await server.stream("/v1/completions", prompt="hi", logprobs=1)
    parts = [e["choices"][0]["logprobs"] for e in events if isinstance(e, dict) and e["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == starts


async def test_a_long_prompt_names_the_prompt(server: Server) -> None:
    error = (await server.complete(prompt=[1] * 4096)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
