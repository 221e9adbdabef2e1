"""Every parameter: what it sets, where its default comes from, and how a wrong value is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stratad.http import params
from stratad.settings import BY_NAME
from stratad.types import EngineFacts, Sampling

from tests.daemon.http.conftest import Server

HUGE = 10**30


async def sampled(server: Server, **fields: Any) -> Sampling:
    """What the engine is asked to do for these fields."""
    response = await server.chat(**fields)
    assert response.status_code == 200, response.text
    return server.service.last.sampling


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1.5, "top_p": 0.9, "min_p": 0.05}, {"temperature": 1.5, "top_p": 0.9, "min_p": 0.05}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"penalty_present": -2.0, "penalty_freq": 2.0}),
        ({"repetition_penalty": 1.1}, {"penalty_repeat": 1.1}),
        ({"repeat_penalty": 1.2}, {"penalty_repeat": 1.2}),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, {"penalty_repeat": 1.1}),
        ({"penalty_last_n": 0}, {"penalty_last_n": 0}),
        ({"repeat_last_n": -1}, {"penalty_last_n": 4096}),
        ({"logit_bias": {"5": -100, "8191": 1.5}}, {"logit_bias": {5: -100.0, 8191: 1.5}}),
        ({"ignore_eos": True}, {"logit_bias": {8185: params.NEVER, 8187: params.NEVER}}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        ({"temperature": None, "stop": None, "logit_bias": None, "n": None, "tools": None}, {"temperature": 1.0}),
    ],
)
async def test_fields_reach_the_engine(server: Server, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    sampling = await sampled(server, **fields)
    assert {name: getattr(sampling, name) for name in expected} == expected


async def test_openais_defaults_when_nobody_says_anything(server: Server) -> None:
    assert await sampled(server, seed=0) == Sampling(seed=0)


async def test_without_a_seed_every_request_has_its_own(server: Server) -> None:
    seeds = {(await sampled(server, **fields)).seed for fields in ({}, {"seed": None}, {"seed": -1})}
    assert len(seeds) == 3


async def test_request_over_settings_over_file_over_default(server: Server) -> None:
    assert server.context.model is not None
    server.context.model = replace(server.context.model, recommended={"temperature": 0.6, "top_k": 20, "top_p": 0.8})
    server.service.settings.set_runtime("top_k", 30)
    server.service.settings.set_runtime("top_p", 0.7)
    sampling = await sampled(server, top_p=0.5)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 30, 0.5, 0.0)


async def test_a_recommendation_out_of_range_is_passed_over(server: Server) -> None:
    assert server.context.model is not None
    server.context.model = replace(server.context.model, recommended={"temperature": -3.0, "top_p": 7.0})
    sampling = await sampled(server)
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)


def test_every_parameter_is_a_setting_and_a_sampling_field() -> None:
    for row in params.SAMPLING:
        assert BY_NAME[row.name].kind in ("int", "float")
        assert hasattr(Sampling(), row.field)
        assert getattr(Sampling(), row.field) == row.default


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "must be a number 0 to 100, not 'hot'"),
    ({"temperature": -0.1}, "temperature", "must be a number 0 to 100"),
    ({"temperature": True}, "temperature", "must be a number 0 to 100, not true"),
    ({"temperature": [1]}, "temperature", "must be a number 0 to 100, not an array"),
    ({"temperature": HUGE}, "temperature", "must be a number 0 to 100"),
    ({"top_p": 1.01}, "top_p", "must be a number 0 to 1"),
    ({"min_p": -1}, "min_p", "must be a number 0 to 1"),
    ({"top_k": 1.5}, "top_k", "must be a whole number"),
    ({"top_k": -2}, "top_k", ", or -1"),
    ({"top_k": HUGE}, "top_k", "must be a whole number"),
    ({"repeat_penalty": 0}, "repeat_penalty", "must be a number 0.01 to 100"),
    ({"penalty_last_n": -2}, "penalty_last_n", "must be a whole number"),
    ({"seed": 2**64}, "seed", "must be a whole number from -9223372036854775808 to 18446744073709551615"),
    ({"seed": 1.5}, "seed", "must be a whole number"),
    ({"stop": ""}, "stop", "must not hold an empty string"),
    ({"stop": ["a", ""]}, "stop", "must not hold an empty string"),
    ({"stop": list("abcde")}, "stop", "must have at most 4 strings, not 5"),
    ({"stop": 3}, "stop", "must be a string or a list of up to 4 strings"),
    ({"stop": ["a", 1]}, "stop", "must be a string or a list of up to 4 strings"),
    ({"logit_bias": []}, "logit_bias", "must be an object"),
    ({"logit_bias": {"8192": 1}}, "logit_bias", "must have token ids from 0 to 8191 as names, not '8192'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "must have token ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "must have token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5] must be a number from -100 to 100, not 101"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "logit_bias[5] must be a number"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"logprobs": 3}, "logprobs", "must be true or false"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be a whole number from 0 to 20, not 21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0 to 20"),
    ({"top_logprobs": 3}, "top_logprobs", 'needs "logprobs": true'),
    ({"n": 0}, "n", "must be 1"),
    ({"n": 2}, "n", "must be 1"),
    ({"n": True}, "n", "must be 1"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"stream_options": 1}, "stream_options", "must be an object"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be true or false"),
    ({"max_tokens": 1.5}, "max_tokens", "must be a whole number of tokens"),
    ({"max_tokens": -2}, "max_tokens", "must be a whole number of tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens", "must be a whole number of tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format", 'must be {"type": "text"}'),
    ({"response_format": {"type": "yaml"}}, "response_format", 'must be {"type": "text"}'),
    ({"response_format": "text"}, "response_format", 'must be {"type": "text"}'),
    ({"grammar": "root ::= x"}, "grammar", "not supported"),
    ({"json_schema": {}}, "json_schema", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", 'must be "none" or "auto"'),
    ({"tools": {}}, "tools", "must be a list"),
    ({"tools": [{"type": "x"}]}, "tools[0]", 'must be an object of type "function"'),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function", "with a name"),
    ({"functions": [{}]}, "functions", "tools"),
    ({"model": 5}, "model", "must be a string"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "cannot set messages"),
    ({"reasoning_effort": 1}, "reasoning_effort", "must be a string"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_wrong_value_names_the_field_and_what_it_may_be(
    server: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        response = await server.chat(**{"stream": stream, **fields})
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert (error["code"], error["type"], error["param"]) == ("invalid_value", "invalid_request_error", param)
        assert words in error["message"]
    assert server.service.generations == []


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    (3, "messages"),
    ("hi", "messages"),
    ([{}], "messages[0].role"),
    (["hi"], "messages[0]"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"role": 1, "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 7}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "a"}, {"role": "tool", "content": None}], "messages[1].content"),
    ([{"role": "user", "content": "a", "name": 1}], "messages[0].name"),
    ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES, ids=lambda value: str(value)[:50])
async def test_malformed_messages_are_refused_at_their_place(server: Server, messages: Any, param: str) -> None:
    for stream in (False, True):
        response = await server.chat(messages=messages, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["message"].startswith(param)


ODD_MESSAGES: list[Any] = [
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": "x"}],
    [{"role": "assistant", "content": "x"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "extra": 1}],
    [{"role": "user", "content": "x"}] * 1500,
    [{"role": "user", "content": "nul \0 inside"}],
]


@pytest.mark.parametrize("messages", ODD_MESSAGES, ids=lambda value: str(value)[:50])
async def test_odd_but_legal_messages_are_answered(server: Server, messages: Any) -> None:
    server.service.facts = EngineFacts(10**6, {})
    for stream in (False, True):
        assert (await server.chat(messages=messages, stream=stream)).status_code == 200


async def test_text_parts_are_lines_of_one_text(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await server.chat(messages=[{"role": "user", "content": parts}])
    ids = server.service.last.prompt_ids
    await server.chat(messages=[{"role": "user", "content": "a\nb"}])
    assert server.service.last.prompt_ids == ids


@pytest.mark.parametrize("name", [*sorted(params.IGNORED)[:6], "nobody_knows_this"])
async def test_fields_that_change_nothing_are_taken(server: Server, name: str) -> None:
    assert (await server.chat(**{name: {"any": "thing"}})).status_code == 200


# -- max_tokens and the context


@pytest.mark.parametrize("value", [None, 0, -1])
async def test_what_is_left_of_the_context(server: Server, value: int | None) -> None:
    await server.chat(max_tokens=value)
    last = server.service.last
    assert last.max_new == 4096 - len(last.prompt_ids)


async def test_max_tokens_is_taken_and_cut_to_what_is_left(server: Server) -> None:
    await server.chat(max_tokens=7)
    assert server.service.last.max_new == 7
    await server.chat(max_tokens=7, max_completion_tokens=5)
    assert server.service.last.max_new == 5
    await server.chat(max_tokens=10**12)
    assert server.service.last.max_new == 4096 - len(server.service.last.prompt_ids)


async def test_the_setting_max_tokens_holds_where_the_request_names_none(server: Server) -> None:
    server.service.settings.set_runtime("max_tokens", 9)
    await server.chat()
    assert server.service.last.max_new == 9
    await server.chat(max_tokens=11)
    assert server.service.last.max_new == 11


async def test_an_answer_that_fills_its_budget_ends_with_length(server: Server) -> None:
    body = (await server.chat(max_tokens=1)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(server: Server, stream: bool) -> None:
    await server.chat()
    count = len(server.service.last.prompt_ids)
    for context, status in ((count + 1, 200), (count, 400), (count - 1, 400)):
        server.service.facts = EngineFacts(context, {})
        response = await server.chat(stream=stream)
        assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert f"{count} tokens" in error["message"] and f"holds {count - 1}" in error["message"]


async def test_a_prompt_that_cannot_fit_is_refused_without_encoding_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.service.tokens), "encode", lambda *_: pytest.fail("encoded"))
    response = await server.chat(messages=[{"role": "user", "content": "a b " * 100_000}])
    assert response.status_code == 400
    assert "at least" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_is_tuned_for_one_request(server: Server, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    tune = {"spec_min_p": 0, "spec_p_cum": 0.5, "spec_p_cum_deep": 1, "pcie_frac": 0.5, "aux_cpus": True}
    assert (await server.client.post(path, json={**body, "strata_tune": tune})).status_code == 200
    assert server.service.last.tune == {"spec_min_p": 0.0, "spec_p_cum": 0.5, "spec_p_cum_deep": 1.0}
    assert server.service.last.end_ids == server.service.tokens.end_ids
    for wrong, name, words in (
        ({"spec_min_p": 1.5}, "strata_tune.spec_min_p", "from 0 to 1, not 1.5"),
        ({"spec_p_cum": True}, "strata_tune.spec_p_cum", "a number"),
        ({"spec_p_cum_deep": "0.5"}, "strata_tune.spec_p_cum_deep", "a number"),
        ({"spec_p_com": 0.5}, "strata_tune.spec_p_com", "takes spec_min_p, spec_p_cum"),
        ([], "strata_tune", "an object"),
    ):
        error = (await server.client.post(path, json={**body, "strata_tune": wrong})).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", name) and words in error["message"]
