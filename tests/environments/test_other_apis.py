"""Requests of the responses API and of Anthropic's messages API as chat requests, and answers of both."""

import pytest

from aligner.environments import messages_api, responses_api
from aligner.environments.openai_api import ApiError, ChatRequest, Reply, read_request

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one and two"},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "well?"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}],
    **{"tool_choice": "none", "max_tokens": 9, "temperature": 0.5, "top_p": 1},
}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"}
SAID = {"type": "output_text", "text": "so", "annotations": [], "logprobs": []}
RESPONSES = {
    "model": "policy",
    "instructions": "be brief",
    "input": [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "and two"}],
        },
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [SAID]},
        {"role": "assistant", "content": ""},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"role": "user", "content": "well?"},
    ],
    "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": None}],
    **{"tool_choice": "none", "max_output_tokens": 9, "temperature": 0.5, "top_p": 1, "store": False},
}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}], "is_error": False}
MESSAGES = {
    "model": "policy",
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "one and two"},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}]},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "well?"}]},
    ],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    **{"tool_choice": {"type": "none"}, "max_tokens": 9, "temperature": 0.5, "top_p": 1},
}


@pytest.mark.parametrize("api, body", [(responses_api, RESPONSES), (messages_api, MESSAGES)])
def test_a_conversation_is_that_of_chat(api, body):
    assert api.read_request(body) == read_request(CHAT)


def test_calls_belong_to_the_text_before_them_and_stop_sequences_are_stop_strings():
    items = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}, CALL, CALL | {"call_id": "c2"}]
    message = responses_api.read_request({"model": "m", "input": items}).messages[-1]
    assert message["content"] == "so" and [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": []}]
    request = messages_api.read_request({"model": "m", "messages": messages, "stop_sequences": ["x"]})
    assert request.stop == ["x"] and request.messages[-1] == {"role": "assistant", "content": ""}


REFUSED = [
    (responses_api, {"previous_response_id": "r"}, "previous_response_id"),
    (responses_api, {"text": {"format": {"type": "json_object"}}}, "text"),
    (responses_api, {"input": []}, "input"),
    (responses_api, {"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
    (responses_api, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    (responses_api, {"input": [CALL | {"arguments": "{"}]}, "input[0]"),
    (responses_api, {"tools": [{"type": "web_search"}]}, "tools[0]"),
    (responses_api, {"tool_choice": "required"}, "tool_choice"),
    (responses_api, {"max_output_tokens": 0}, "max_output_tokens"),
    (messages_api, {"thinking": {"type": "adaptive"}}, "thinking"),
    (messages_api, {"messages": [{"role": "tool", "content": "3"}]}, "messages[0].role"),
    (messages_api, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    (messages_api, {"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    (messages_api, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    (messages_api, {"tools": [{"name": "add", "input_examples": [{}]}]}, "tools[0].input_examples"),
    (messages_api, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (messages_api, {"stop_sequences": "x"}, "stop_sequences"),
    (messages_api, {"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize("api, change, param", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(api, change, param):
    with pytest.raises(ApiError) as refused:
        api.read_request((RESPONSES if api is responses_api else MESSAGES) | change)
    assert refused.value.body["error"]["param"] == param
    assert param in api.error_body(refused.value)["error"]["message"]


@pytest.mark.parametrize(
    "reason, stop, status, ended",
    [
        ("stop", None, "completed", "end_turn"),
        ("stop", "x", "completed", "stop_sequence"),
        ("length", None, "incomplete", "max_tokens"),
        ("tool_calls", None, "completed", "tool_use"),
    ],
)
def test_an_answer_tells_how_it_ended_and_its_events_tell_the_same(reason, stop, status, ended):
    message = {"role": "assistant", "content": "so"} | ({"tool_calls": CALLS} if reason == "tool_calls" else {})
    body = Reply(message, reason, [1, 2], [3], [-0.5], ["so"], stop).body(ChatRequest("policy", []), "chatcmpl-7-1")
    own = responses_api.answer(body | {"created": 5}, {"instructions": "be brief"})
    assert (own["id"], own["status"], own["instructions"]) == ("resp_7-1", status, "be brief")
    assert [item["type"] for item in own["output"]] == ["message", *(["function_call"] if "tool" in ended else [])]
    *_, last = events = list(responses_api.events(own))
    assert last["type"] == f"response.{status}" and last["response"] == own
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    other = messages_api.answer(body, {})
    assert (other["stop_reason"], other["stop_sequence"]) == (ended, stop)
    assert other["usage"] == {"input_tokens": 2, "output_tokens": 1}
    assert [block["type"] for block in other["content"]] == ["text", *(["tool_use"] if "tool" in ended else [])]
