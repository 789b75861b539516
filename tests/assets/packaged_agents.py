"""Agents of packages, as their documentation makes them, in a sandbox: python packaged_agents.py NAME FOLDER ..."""

import json
import os
import sys

sys.path[1:1] = sys.argv[2:]  # of packages
data = json.load(sys.stdin)
messages, sampling = data["task"]["messages"], data["sampling"]
question, base_url, model = messages[-1]["content"], os.environ["OPENAI_BASE_URL"], sampling["model"]


def write(text: str) -> str:
    """Write the file a.txt.

    Args:
        text: Its text.
    """
    with open("a.txt", "w", encoding="utf-8") as file:
        file.write(text)
    return "written"


def smolagents():
    from smolagents import CodeAgent, OpenAIModel, tool

    agent = CodeAgent(tools=[tool(write)], model=OpenAIModel(model, api_base=base_url, api_key="none"), max_steps=2)
    agent.run(question)


def agents():
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    first = Runner.run_sync(Agent("writer", tools=[function_tool(write)], model=model), question, max_turns=3)
    again = [*first.to_input_list(), {"role": "user", "content": "sure?"}]
    Runner.run_sync(Agent("writer", tools=[function_tool(write)], model=model), again)


def minisweagent():
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    model_kwargs = {"api_base": base_url, "api_key": "none"}
    textbased = LitellmTextbasedModel(
        model_name=f"openai/{model}", model_kwargs=model_kwargs, cost_tracking="ignore_errors"
    )
    templates = {"system_template": "Write bash.", "instance_template": "{{task}}"}
    DefaultAgent(textbased, LocalEnvironment(), step_limit=2, cost_limit=0, **templates).run(question)


globals()[sys.argv[1]]()
