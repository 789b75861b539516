"""Agents of the tests: programs that speak OpenAI's chat API."""

import asyncio
import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import time

import openai

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ROLL = {"type": "function", "function": {"name": "roll", "description": "Rolls the dice.", "parameters": {}}}


def talk(base_url):
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


async def calculate(task, base_url, sampling, limit=8):
    """Does what the model calls for; 1 if it says 3 at last."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    messages = list(task.messages)
    for _ in range(limit):
        actual = await client.chat.completions.create(messages=messages, tools=[CALCULATOR], **sampling)
        message = actual.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return {"reward": float("3" in message.content), "turns": len(messages)}
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def dice(task, base_url, sampling):
    """Rolls what nobody has fixed, perhaps late; so is its verdict."""
    client, chance, messages = talk(base_url), random.SystemRandom(), list(task.messages)
    for _ in range(3):
        message = client.chat.completions.create(messages=messages, tools=[ROLL], **sampling).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        time.sleep(chance.choice([0, 0, 0.03]))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(chance.randint(1, 6))})
    return chance.random()


def seeded(task, base_url, sampling):
    """What the environment Clock is, of the group's seed."""
    chance, client, messages = random.Random(task.seed), talk(base_url), list(task.messages)
    for _ in range(3):
        message = client.chat.completions.create(messages=messages, tools=[ROLL], **sampling).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            time.sleep(chance.choice([0, 0.02, 0.1]))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(chance.randint(1, 6))})
        if not message.tool_calls:
            break
    return chance.random()


async def late(task, base_url, sampling, most_s=0.0):
    """What the environment Late is, until it is refused. Its result is the sum of the logprobs that it was sent."""
    http = openai.DefaultAsyncHttpxClient(verify=False)  # reads no certificates
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=http)
    chance, messages, total = random.Random(task.seed), list(task.messages), 0.0
    with contextlib.suppress(openai.BadRequestError):
        while True:
            asked = {"messages": messages, "tools": [ROLL], "logprobs": True}
            (choice,) = (await client.chat.completions.create(**asked, **sampling)).choices
            total += sum(token.logprob for token in choice.logprobs.content)
            messages.append(choice.message.model_dump(exclude_none=True))
            if not choice.message.tool_calls:
                break
            await asyncio.sleep(random.SystemRandom().uniform(0, most_s))
            for call in choice.message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(chance.randint(1, 6))})
    return total


def asks(task, base_url, sampling):
    """Sends the requests of the row, one after the other; its result is what came back."""
    client, results = talk(base_url), []
    for request in task.row["requests"]:
        try:
            results.append(
                client.chat.completions.create(**({"messages": task.messages} | sampling | request)).to_dict()
            )
        except openai.APIStatusError as error:
            results.append({"status": error.status_code, "error": error.body})
    return {"reward": task.row.get("reward", 1.0), "found": results}


async def together(task, base_url, sampling):
    """Three requests at a time."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    ask = lambda i: client.chat.completions.create(messages=[{"role": "user", "content": f"q{i}"}], **sampling)  # noqa: E731
    answer = await asyncio.gather(*(ask(i) for i in range(3)))
    return float(len({one.choices[0].message.content for one in answer}))


async def ordered(task, base_url, sampling, folder):
    """Sends three requests at a time, each longer than the one before; the longest first if there is a file in the
    folder. 1 if each got its own reply."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    order, replies = [3, 2, 1] if list(pathlib.Path(folder).iterdir()) else [1, 2, 3], {}

    async def ask(length):
        asked = {"messages": [{"role": "user", "content": "q" * length}], "extra_body": {"return_token_ids": True}}
        replies[length] = await client.chat.completions.create(**asked, **sampling)

    await asyncio.gather(*map(ask, order))
    first, second, third = (len(replies[length].prompt_token_ids) for length in (1, 2, 3))
    return float(first < second < third)


def stubborn(task, base_url, sampling):
    """Asks until it is refused; without a `verdict` in the row it dies of that."""
    client, messages = talk(base_url), list(task.messages)
    try:
        while True:
            text = client.chat.completions.create(messages=messages, **sampling).choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    except openai.BadRequestError as error:
        if "verdict" not in task.row:
            raise
        return {"reward": task.row["verdict"], "code": error.code}


def troubled(task, base_url, sampling, folder="", fails=1):
    """Fails behind its first answer in a way of the row's choice, as often as a file in `folder` is not there."""
    client, kind = talk(base_url), task.row["kind"]
    client.chat.completions.create(messages=task.messages, **sampling)
    marks = list(pathlib.Path(folder).glob(f"{kind}-*"))
    if len(marks) < fails:
        (pathlib.Path(folder) / f"{kind}-{len(marks)}").touch()
        if kind == "raised":
            raise ConnectionError("no network")
        if kind == "died":
            os.kill(os.getpid(), signal.SIGKILL)
        clock = time.monotonic
        time.monotonic = lambda: clock() + 3600  # the worker's server looks at it ten times a second
        time.sleep(600)
    again = client.chat.completions.create(messages=task.messages, **sampling)
    return None if kind == "shy" else float(len(again.choices[0].message.content))


def impatient(task, base_url, sampling, folder, retries=2):
    """Gives up soon, and asks again, or dies of that: with time, then. Each try is a file in `folder`."""

    def begin(request):
        number = len(list(pathlib.Path(folder).iterdir()))
        request.extensions["timeout"] = {"read": None if number else 0.2}
        (pathlib.Path(folder) / str(number)).touch()

    http = openai.DefaultHttpxClient(event_hooks={"request": [begin]})
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=retries, http_client=http)
    try:
        reply = client.chat.completions.create(messages=task.messages, **sampling)
    except openai.APITimeoutError:
        (pathlib.Path(folder) / "1").touch()
        raise
    return float(len(reply.choices[0].message.content))


def address(task, base_url, sampling):
    """Asks with its own address."""
    talk(base_url).chat.completions.create(messages=[{"role": "user", "content": base_url}], **sampling)
    return 1.0


def silent(task, base_url, sampling):
    return 1.0


if __name__ == "__main__":  # as a command line
    inputs = json.load(sys.stdin)
    reply = openai.OpenAI(max_retries=0).chat.completions.create(
        messages=inputs["task"]["messages"], **inputs["sampling"]
    )
    print("what it prints before is no result")
    result = {"reward": len(reply.choices[0].message.content), "pid": os.getpid()}
    print(json.dumps(result | {"also": os.environ["ANTHROPIC_BASE_URL"]}))
    if "fail" in sys.argv:
        sys.exit(3)
