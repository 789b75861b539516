"""A trained model behind OpenAI's chat API, asked by its client; on the loopback and on a unix socket."""

import asyncio
import json
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from aligner.config.resolve import compose
from aligner.data.tokenizer import stop_token_ids
from aligner.errors import AlignerError, ConfigError
from aligner.rollout.served import PendingRequest, TextStream
from aligner.tools.generate import Answerer, model_folder
from aligner.tools.serve import RequestQueue, open_model, serve_while
from aligner.types import SamplingParams

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
import openai

from aligner.environments.endpoint import Listener, loopback, make_app, unix_socket
from tests.tools.serving import listening

HALF = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
HALF_AT = "messages[0].tool_calls[0]"


@pytest.fixture(scope="module")
def served(tiny_runs):
    return open_model(compose([f"run.dir={tiny_runs['sft']}", "eval.temperature=1", "sampling.max_response_tokens=8"]))


@pytest.fixture
def client(served):
    listener = loopback()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/{served.secret}/v1"
    with listening(served, listener), straight() as http:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)


def straight():
    """Not by a proxy."""
    return openai.DefaultHttpxClient(trust_env=False)


def ask(client, text, **more):
    body = {"model": "sft", "messages": [{"role": "user", "content": text}], "extra_body": {"return_token_ids": True}}
    return client.chat.completions.create(**body | more)


def test_an_answer_is_what_the_engine_says_with_the_same_seed(served, client, tiny_runs):
    """Of an engine of its own: the served one may still be at work in its thread when its answer is here."""
    answer = ask(client, "say a:", seed=7, logprobs=True)
    model = Answerer.load(tiny_runs["sft"] / "hf", served.desk.model.engine.config)
    prompt = served.dialogues.of([]).begin([{"role": "user", "content": "say a:"}])
    sampling = SamplingParams(8, 1.0, stop_token_ids=stop_token_ids(model.tokenizer))
    out = model.engine.generate([prompt.tokens], [[7]], sampling)
    tokens = out.tokens[0, : int(out.lengths[0])].tolist()
    choice = answer.choices[0]
    assert answer.prompt_token_ids == list(prompt.tokens) and choice.token_ids == tokens
    logprobs = [one.logprob for one in choice.logprobs.content]
    assert logprobs == pytest.approx(out.logprobs[0, : len(tokens)].tolist(), abs=1e-5)
    assert choice.message.content == model.tokenizer.decode(tokens, skip_special_tokens=True)
    parts = [chunk.choices[0] for chunk in ask(client, "say a:", seed=7, logprobs=True, stream=True, extra_body={})]
    assert "".join(chunk.delta.content or "" for chunk in parts) == choice.message.content
    reports = [one for chunk in parts if chunk.logprobs for one in chunk.logprobs.content]
    assert [one.logprob for one in reports] == logprobs and "".join(one.token for one in reports).startswith(
        choice.message.content
    )


def test_requests_at_a_time_are_answered_each_as_it_asked(client):
    """Of several lengths, limits and temperatures: together or in turn, as alone."""
    asked = [
        {"text": "say " + "abc"[i % 3] * (1 + i % 4), "seed": i, "temperature": 5 * (i % 2), "max_tokens": 2 + i % 3}
        for i in range(12)
    ]
    alone = [ask(client, **one).choices[0].token_ids for one in asked]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda one: ask(client, **one).choices[0].token_ids, asked))
    assert together == alone and len({tuple(tokens) for tokens in alone}) > 4
    assert all(len(tokens) <= one["max_tokens"] for tokens, one in zip(alone, asked, strict=True))


def test_a_stream_comes_as_the_model_speaks(served, client, monkeypatch):
    """The engine's third step waits for a client that has heard the first; and the whole is what is told at once."""
    settings = {"seed": 7, "temperature": 5, "extra_body": {}}
    whole = ask(client, "say a:", **settings).choices[0]
    assert len(whole.message.content) > 3
    heard, steps, step = threading.Event(), [], served.desk.model.engine.step

    def waits(*args):
        steps.append(len(steps) < 3 or heard.wait(120))
        return step(*args)

    monkeypatch.setattr(served.desk.model.engine, "step", waits)
    chunks = []
    for chunk in ask(client, "say a:", stream=True, stream_options={"include_usage": True}, **settings):
        chunks.append(chunk)
        heard.set()
    assert all(steps) and len(steps) > 3
    reports = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in reports) == whole.message.content
    assert [choice.delta.role for choice in reports] == ["assistant", *[None] * (len(reports) - 1)]
    assert reports[-1].finish_reason == whole.finish_reason and {choice.finish_reason for choice in reports[:-1]} == {
        None
    }
    assert chunks[-1].usage.completion_tokens == len(steps) and len({chunk.id for chunk in chunks}) == 1


def test_a_stream_tells_no_part_of_a_character_or_of_a_stop_string(served, client):
    tokenizer = served.desk.model.tokenizer
    tokens = tokenizer.encode("né €x. o", add_special_tokens=False)
    written = TextStream(served.dialogues.of([]).decode, held=2)
    reports = [written.add(token) for token in tokens]
    assert "".join(reports) == "né €x." and not any("\ufffd" in text for text in reports)
    content = ask(client, "say a:", seed=7, temperature=5, extra_body={}).choices[0].message.content
    stop = content[2:5]
    parts = ask(client, "say a:", seed=7, temperature=5, extra_body={}, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == content[: content.find(stop)]


def test_a_request_that_the_engine_has_no_room_for_is_told_so(served, client, monkeypatch):
    engine = served.desk.model.engine
    small = replace(engine.config, kv_cache_bytes=1)
    for name, value in {"config": small, "step": lambda *args: torch.ones(2) + torch.ones(3)}.items():
        for stream in (False, True):
            with monkeypatch.context() as changed, pytest.raises(openai.InternalServerError) as refused:
                changed.setattr(engine, name, value)
                ask(client, "say a:", stream=stream)
            assert refused.value.body["code"] == "engine"
    assert ask(client, "say a:").choices


def test_a_request_that_the_engine_has_cannot_be_taken_back(served, client, monkeypatch):
    """Not even before its prompt is read: who has left would end the engine's thread, which tells what went wrong."""
    left = []

    def serve(pool, *_):
        left.append(pool.first.answer.cancel())
        raise RuntimeError("no room")

    with monkeypatch.context() as changed, pytest.raises(openai.InternalServerError, match="no room"):
        changed.setattr(served.desk.model.engine, "serve", serve)
        ask(client, "say a:", temperature=0.125)  # which no request before it has: it begins a generation of its own
    assert left == [False]


@pytest.mark.parametrize("error", [ValueError("odd"), KeyError("k"), AssertionError(), MemoryError(), StopIteration()])
def test_whatever_the_engine_raises_is_reported_and_it_goes_on(served, client, monkeypatch, error):
    def serve(pool, *_):
        if isinstance(error, ValueError):
            pool.take()
        raise error

    for stream in (False, True):
        with monkeypatch.context() as changed, pytest.raises(openai.InternalServerError) as refused:
            changed.setattr(served.desk.model.engine, "serve", serve)
            ask(client, "say a:", stream=stream, temperature=0.125)
        assert refused.value.body["code"] == "engine" and type(error).__name__ in refused.value.body["message"]
    assert ask(client, "say a:").choices


def test_a_request_that_the_engine_forgets_is_told_so(served, client, monkeypatch):
    with monkeypatch.context() as changed, pytest.raises(openai.InternalServerError, match="no answer"):
        changed.setattr(served.desk.model.engine, "serve", lambda pool, *_: pool.take())
        ask(client, "say a:", temperature=0.125)


@pytest.mark.parametrize("error", [torch.AcceleratorError("device-side assert"), SystemExit(3), KeyboardInterrupt()])
def test_an_engine_that_cannot_go_on_ends_the_server_and_all_who_wait_hear_of_it(served, error):
    """Those that it has, those that wait for it, and those that come too late."""
    begun, go = threading.Event(), threading.Event()

    def serve(pool, *_):
        pool.take()
        begun.set()
        assert go.wait(120)
        raise error

    desk = RequestQueue(SimpleNamespace(engine=SimpleNamespace(serve=serve, model=served.desk.model.engine.model)), 1)
    own, listener, ended = replace(served, desk=desk), loopback(), []
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/{own.secret}/v1"
    body = {"model": "sft", "messages": [{"role": "user", "content": "say a:"}]}

    def serving():
        with pytest.raises(AlignerError, match="the thread `engine` has ended") as raised:
            serve_while(desk, Listener(make_app(own), 120), [listener])
        ended.append(raised.value)

    server = threading.Thread(target=serving, daemon=True)
    server.start()
    with httpx.Client(trust_env=False, timeout=120) as http, ThreadPoolExecutor(4) as pool:
        asked = [{"stream": i % 2 == 1, "temperature": 0.5 + i} for i in range(4)]
        replies = [pool.submit(http.post, f"{url}/chat/completions", json=body | settings) for settings in asked]
        assert begun.wait(120)
        while len(desk.waiting) < 3:
            time.sleep(0.01)
        go.set()
        for reply in replies:
            assert reply.result(120).status_code == 503 and reply.result().json()["error"]["code"] == "engine"
    server.join(120)
    assert type(error).__name__ in str(ended[0])
    late = PendingRequest((1,), 0, served.sampling)
    desk.put([late])
    with pytest.raises(RuntimeError, match="has ended"):
        late.answer.result(120)


def test_messages_that_make_no_token_are_refused(tiny_runs, tmp_path):
    """Some templates say nothing of an empty message, some nothing at all."""
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    served = open_model(
        compose([f"run.dir={tiny_runs['sft']}", "sampling.max_response_tokens=4", f"data.chat_template={template}"])
    )
    listener = loopback()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/{served.secret}/v1"
    with listening(served, listener), straight() as http:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="makes no token of them"):
                ask(client, "", stream=stream)
        assert ask(client, "a").choices


@torch.no_grad()
def test_completions_of_texts_and_tokens_have_the_logprobs_of_transformers(served, client, tiny_runs):
    """The served model computes in bfloat16, so that only a loose comparison is possible here."""
    model = AutoModelForCausalLM.from_pretrained(tiny_runs["sft"] / "hf", dtype=torch.float32)
    tokenizer = served.desk.model.tokenizer
    texts = ["say a:", "say bbb: c"]
    tokens = [tokenizer.encode(text) for text in texts]
    settings = {"model": "sft", "temperature": 0, "logprobs": 2, "echo": True}
    of_texts = client.completions.create(prompt=texts, max_tokens=3, **settings).choices
    assert [choice.index for choice in of_texts] == [0, 1]
    for text, prompt, choice in zip(texts, tokens, of_texts, strict=True):
        shown = choice.logprobs
        assert choice.text.startswith(text) and shown.token_logprobs[0] is None and shown.top_logprobs[0] is None
        alone = client.completions.create(prompt=prompt, max_tokens=0, **settings).choices[0]
        assert alone.text == text and len(alone.logprobs.tokens) == len(prompt)
        assert alone.logprobs.token_logprobs[1:] == pytest.approx(shown.token_logprobs[1 : len(prompt)], abs=0.02)
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert alone.logprobs.token_logprobs[1:] == pytest.approx(own.tolist(), abs=0.05)
        assert [max(top.values()) for top in shown.top_logprobs[len(prompt) :]] == shown.token_logprobs[len(prompt) :]
        unechoed = client.completions.create(prompt=prompt, max_tokens=3, **settings | {"echo": False}).choices[0]
        assert text + unechoed.text == choice.text and unechoed.logprobs.tokens == shown.tokens[len(prompt) :]
    one = client.completions.create(prompt=[5], max_tokens=0, **settings).choices[0]
    assert one.logprobs.token_logprobs == [None]


def test_an_echo_of_a_text_is_that_text(served, client, monkeypatch):
    tokenizer = served.desk.model.tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: [5, *encode(text)])  # as those with a first token
    settings = {"model": "sft", "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = client.completions.create(prompt="say a:", **settings).choices[0]
    assert choice.text == "say a:" and len(choice.logprobs.tokens) == len(encode("say a:")) + 1


def test_completions_end_before_a_stop_string(client):
    settings = {"model": "sft", "prompt": "say a:", "temperature": 5, "seed": 7, "max_tokens": 8}
    whole = client.completions.create(**settings).choices[0]
    stop = whole.text[2:4]
    cut = client.completions.create(**settings, stop=[stop]).choices[0]
    assert whole.logprobs is None and len(whole.text) > 4
    assert cut.text == whole.text[: whole.text.find(stop)] and cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("wrong", "param", "code"),
    [
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
        ({"prompt": [1, -1]}, "prompt", "invalid_value"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
        ({"prompt": [[1], 2]}, "prompt", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 60}, "prompt", "context_length_exceeded"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"echo": "yes"}, "echo", "invalid_value"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"model": "gpt-9"}, "model", "model_not_found"),
    ],
)
def test_completions_that_cannot_be_made_are_refused_by_name(client, wrong, param, code):
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(**{"model": "sft", "prompt": "say a:"} | wrong)
    assert (refused.value.body["param"], refused.value.body["code"]) == (param, code)


@pytest.mark.parametrize("left", ["in its request", "while it waits", "in its stream"])
def test_of_a_client_that_leaves_nothing_is_reported(left, capfd, caplog):
    begun, spoken, gone = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def model(self, secret):
            begun.set()
            return "m"

        async def complete(self, secret, request, say):
            say("id", "text ")
            spoken.set()
            while not gone.is_set():
                say("id", "text ")
                await asyncio.sleep(0.01)
            return {"id": "id", "model": "m", "choices": [], "usage": {}}

    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": "stream" in left})
    head = f"POST /s/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    listener = loopback()
    with listening(Slow(), listener) as server:
        for reset in (False, True):
            begun.clear(), spoken.clear(), gone.clear()
            with socket.create_connection(listener.getsockname()) as client:
                if left == "in its request":
                    client.sendall((head + body[:5]).encode())
                    assert begun.wait(120)
                else:
                    client.sendall((head + body).encode())
                    assert spoken.wait(120)
                    if left == "in its stream":
                        assert client.recv(100)
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.set()
            until = time.monotonic() + 120
            while server.server_state.connections or server.server_state.tasks:
                assert time.monotonic() < until
                time.sleep(0.01)
    assert capfd.readouterr().err == "" and caplog.records == []


def test_what_the_model_cannot_do_is_refused(client):
    wrong = [
        ({"model": "gpt-9"}, "model", "model_not_found"),
        ({"max_tokens": 60}, "messages", "context_length_exceeded"),
        ({"text": "x" * 80}, "messages", "context_length_exceeded"),
        ({"temperature": -1}, None, "invalid_value"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"extra_body": {"top_k": 2.5}}, "top_k", "invalid_value"),
        ({"messages": [{"role": "assistant", "tool_calls": [HALF]}]}, HALF_AT, "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools", "unsupported_parameter"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages", "invalid_value"),
    ]
    for extra, param, code in wrong:
        with pytest.raises(openai.APIStatusError) as refused:
            ask(client, **{"text": "say a:"} | extra)
        assert (refused.value.body["param"], refused.value.body["code"]) == (param, code)
    assert [model.id for model in client.models.list()] == ["sft"]


def test_a_unix_socket_is_for_its_user_alone(served, tmp_path):
    path = tmp_path / "model.sock"
    for _ in range(2):  # one that is left behind is replaced
        listener = unix_socket(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with (
            listening(served, listener),
            httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=120) as client,
        ):
            assert client.get(f"http://localhost/{served.secret}/v1/models").json()["data"][0]["id"] == "sft"
            assert client.get("http://localhost/guess/v1/models").status_code == 404


def test_a_model_is_found_in_a_run_or_in_a_folder(tiny_runs, tmp_path):
    hf = tiny_runs["sft"] / "hf"
    assert model_folder(compose([f"run.dir={tiny_runs['sft']}"])) == model_folder(compose([f"run.dir={hf}"])) == hf
    with pytest.raises(ConfigError, match=r"run\.dir=.*a finished run"):
        model_folder(compose([f"run.dir={tmp_path}"]))
