"""What clients send back of a conversation: nothing of it is passed over that a template could read."""

import pytest

from aligner.environments.openai_api import ApiError, read_request


def last(**message):
    return read_request({"model": "m", "messages": [{"role": "user", "content": "q"}, message]}).messages[-1]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template_by_the_name_that_they_came_with(name):
    assert last(role="assistant", content="a", **{name: "hm"}) == {"role": "assistant", "content": "a", name: "hm"}
    assert name not in last(role="assistant", content="a", **{name: None})
    with pytest.raises(ApiError) as refused:
        last(role="assistant", content="a", **{name: ["hm"]})
    assert refused.value.body["error"]["param"] == f"messages[1].{name}"


@pytest.mark.parametrize(
    ("name", "value"), [("function_call", {"name": "f", "arguments": "{}"}), ("audio", {"id": "audio_1"})]
)
def test_what_a_message_says_otherwise_than_by_its_text_is_refused(name, value):
    """It would stand in the conversation as an empty turn."""
    with pytest.raises(ApiError) as refused:
        last(role="assistant", content=None, **{name: value})
    assert refused.value.body["error"]["param"] == f"messages[1].{name}"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio", "file"])
def test_media_are_refused_in_every_role(role, kind):
    """A text beside them, as some clients send, is no content either."""
    parts = [{"type": "text", "text": "q"}, {"type": kind, kind: {"url": "x"}, "text": "a picture"}]
    with pytest.raises(
        ApiError, match="expected a text, or a list of texts: images, video and audio are not"
    ) as refused:
        last(role=role, content=parts)
    assert refused.value.body["error"]["param"] == "messages[1].content"
    assert last(role=role, content=parts[:1])["content"] == "q"


def test_what_openais_client_sends_back_of_an_answer_is_read():
    unsaid = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert last(role="assistant", content="a", **unsaid) == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("written", "read"), [("", {}), (None, {}), (" ", {}), ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1})]
)
def test_the_arguments_of_a_call_may_be_absent(written, read):
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": written}}
    (actual,) = last(role="assistant", content=None, tool_calls=[call])["tool_calls"]
    assert actual == {"id": "", "type": "function", "function": {"name": "f", "arguments": read}}
    for wrong in ("[1]", "{", 3, [1]):
        call["function"]["arguments"] = wrong
        with pytest.raises(ApiError, match=r"arguments=.*expected a JSON object"):
            last(role="assistant", content=None, tool_calls=[call])
