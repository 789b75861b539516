"""Agents made with smolagents, as its documentation makes them."""

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def calls(task, base_url, sampling):
    """Calls its tools."""
    return _result(ToolCallingAgent, task, base_url, sampling | {"tool_choice": "auto"})


def codes(task, base_url, sampling):
    """Writes its calls as Python."""
    return _result(CodeAgent, task, base_url, sampling)


def _result(kind, task, base_url, sampling):
    settings = {name: value for name, value in sampling.items() if name != "model"}
    model = OpenAIModel(sampling["model"], api_base=base_url, api_key="none", **settings)
    agent = kind(tools=[add], model=model, max_steps=3, verbosity_level=0)
    return float(str(agent.run(task.messages[-1]["content"])) == "3")
