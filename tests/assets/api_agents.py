"""An agent that speaks each of the three APIs, by the packages of their makers."""

import asyncio
import json

import openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}


def tool_of(kind):
    if kind == "chat":
        return {"type": "function", "function": ADD}
    if kind == "responses":
        return {"type": "function", "strict": None, **ADD}
    return {"name": "add", "description": ADD["description"], "input_schema": PARAMETERS}


class Talk:
    """A conversation: `send` returns the text of the reply and its calls, and keeps what the client returned."""

    def __init__(self, kind, base_url, sampling, stream):
        names = ("model", "max_tokens") if kind == "messages" else sampling  # its client has no others
        self.sampling = {name: sampling[name] for name in names}
        self.kind, self.stream, self.items = kind, stream, []
        if kind == "messages":
            import anthropic

            self.client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)
        else:
            self.client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)

    def send(self, *items, **more):
        self.items += items
        return getattr(self, self.kind)(**self.sampling, **more)

    def chat(self, **settings):
        made = self.client.chat.completions
        settings |= {"messages": [{"role": "system", "content": "brief"}, *self.items], "tools": [tool_of("chat")]}
        if self.stream:
            with made.stream(**settings) as events:
                message = [*events][-1] and events.get_final_completion().choices[0].message
        else:
            message = made.create(**settings).choices[0].message
        self.items.append(message.to_dict())
        calls = [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        return message.content or "", calls

    def responses(self, max_tokens=None, **settings):
        settings |= {"instructions": "brief", "input": self.items, "tools": [tool_of("responses")]}
        settings |= {"max_output_tokens": max_tokens}
        if self.stream:
            with self.client.responses.stream(**settings) as events:
                for event in events:
                    assert event.type != "error"
                reply = events.get_final_response()
        else:
            reply = self.client.responses.create(**settings)
        # parsed arguments are of the client alone
        self.items += [item.to_dict(exclude_none=True) for item in reply.output]
        self.reply = reply
        calls = [item for item in reply.output if item.type == "function_call"]
        return reply.output_text, [(call.call_id, json.loads(call.arguments)) for call in calls]

    def messages(self, **settings):
        settings |= {"system": "brief", "messages": self.items, "tools": [tool_of("messages")]}
        if self.stream:
            with self.client.messages.stream(**settings) as events:
                reply = events.get_final_message()
        else:
            reply = self.client.messages.create(**settings)
        content = [block.to_dict() for block in reply.content]
        self.items.append({"role": "assistant", "content": content})
        self.reply = reply
        texts = [block.text for block in reply.content if block.type == "text"]
        return "".join(texts), [(block.id, block.input) for block in reply.content if block.type == "tool_use"]

    def result(self, name, text):
        """Return the item of a tool's result."""
        return {
            "chat": {"role": "tool", "tool_call_id": name, "content": text},
            "responses": {"type": "function_call_output", "call_id": name, "output": text},
            "messages": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": text}]},
        }[self.kind]

    def edit(self, text):
        """Replace the text of the last reply."""
        last = self.items[-1]
        if self.kind == "chat":
            last["content"] = text
        else:
            last["content"][0]["text"] = text


def speak(task, base_url, sampling):
    """A conversation by each of the row's APIs: a call, its result, a question, and one about an edited reply."""
    heard = []
    for kind, stream in task.row["talks"]:
        talk = Talk(kind, base_url, sampling, stream)
        text, ((name, arguments),) = talk.send({"role": "user", "content": "add 1 and 2"})
        texts = [text, talk.send(talk.result(name, str(arguments["a"] + arguments["b"])))[0]]
        texts.append(talk.send({"role": "user", "content": "sure?"})[0])
        talk.edit("it is 4")
        texts.append(talk.send({"role": "user", "content": "really?"})[0])
        heard.append(texts)
    return {"reward": 1.0, "heard": heard}


async def both(task, base_url, sampling):
    """Two requests at a time, then one of each API that is refused."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    settings = {"model": sampling["model"], "temperature": sampling["temperature"]}
    ask = lambda text: client.responses.create(input=text, **settings)  # noqa: E731
    replies = await asyncio.gather(ask("one"), ask("two"))
    errors = []
    for path, body in (("responses", {"input": "q"}), ("messages", {"messages": [{"role": "user", "content": "q"}]})):
        try:
            await client.post(f"/{path}", body={"model": "gpt-9", **body}, cast_to=object)
        except openai.NotFoundError as error:
            errors.append(error.response.json())
    return {"reward": 1.0, "texts": [reply.output_text for reply in replies], "errors": errors}
