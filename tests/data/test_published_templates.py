"""Thoughts, calls and loss masks by the templates of this year's models, as docs/reference/data.md lists them."""

import hashlib
import re
from pathlib import Path

import pytest

from aligner.data.dialogue import Dialogue
from aligner.data.formats import SftRow
from aligner.data.rendering import try_text
from aligner.data.shipped_templates import training_template
from aligner.data.template_checks import loses_thoughts
from aligner.data.templates import encode_sft
from aligner.data.tokenizer import load_tokenizer
from aligner.data.tool_calls import read_calls
from tests.chat_templates import KIMI_K2, LFM2_5, MINISTRAL3, NEMOTRON3
from tests.data.test_shipped_templates import FAMILIES, THINK, like_qwen3_5

AT = {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": AT}}]
KIMI = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>")
KIMI += ("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
MISTRAL = ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]")
LFM = ("<|tool_call_start|>", "<|tool_call_end|>", *THINK)
QWEN3_6 = like_qwen3_5(" or (preserve_thinking is defined and preserve_thinking is true)")
MODELS = {
    **{
        name: (FAMILIES[key][0](), FAMILIES[key][1])
        for name, key in {"Qwen3.5": "qwen3_5", "GLM-4.5": "glm4_5"}.items()
    },
    "Qwen3.6": (QWEN3_6, FAMILIES["qwen3_5"][1]),
    "gpt-oss": (FAMILIES["gpt_oss"][0](), FAMILIES["gpt_oss"][1]),
    "Nemotron 3": (NEMOTRON3, {"extra": THINK, "regex": False}),
    "Kimi K2": (KIMI_K2, {"extra": KIMI}),
    "Ministral 3": (MINISTRAL3, {"extra": MISTRAL, "eos": "</s>"}),
    "Gemma 4": (FAMILIES["gemma4"][0](), FAMILIES["gemma4"][1]),
    "LFM2.5": (LFM2_5, {"extra": LFM}),
}
END = "<|im_end|>\n"
ONE = "<tool_call>\n<function=look>\n<parameter=at>\n{}\n</parameter>\n</function>\n</tool_call>"
XML = f"{ONE.format('a')}\n{ONE.format('b')}"
GLM = "".join(f"\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{at}</arg_value>\n</tool_call>" for at in "ab")
HARMONY = ' to=functions.look<|channel|>commentary json<|message|>{"at": "a"}<|call|>'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant", "<|channel|>final<|message|>{}<|return|>"
SECTION = "".join(
    f'<|tool_call_begin|>functions.look:{i}<|tool_call_argument_begin|>{{"at": "{at}"}}<|tool_call_end|>'
    for i, at in enumerate("ab")
)
KIMI_CALLS = f"<|tool_calls_section_begin|>{SECTION}<|tool_calls_section_end|><|im_end|>"
ARGS = "".join(f'[TOOL_CALLS]look[ARGS]{{"at": "{at}"}}' for at in "ab") + "</s>"
GEMMA = "".join(f'<|tool_call>call:look{{at:<|"|>{at}<|"|>}}<tool_call|>' for at in "ab") + "<|tool_response>"
CHANNEL = "<|channel>thought\n"
PYTHON = "<|tool_call_start|>[look(at='a'), look(at='b')]<|tool_call_end|>"
# what is learned of TURNS, with their thoughts and without
LEARNED = {
    "Qwen3.5": (
        [f"hm\n</think>\n\n{XML}{END}", f"so\n</think>\n\n15{END}", f"yes\n</think>\n\nbye{END}"],
        [f"{XML}{END}", f"15{END}", f"bye{END}"],
    ),
    "GLM-4.5": (
        [f"\n<think>hm</think>{GLM}<|observation|>", "\n<think>so</think>\n15<|user|>",
         "\n<think>yes</think>\nbye<|user|>"],
        [f"\n<think></think>{GLM}<|observation|>", "\n<think></think>\n15<|user|>", "\n<think></think>\nbye<|user|>"],
    ),
    "gpt-oss": (
        [text.format(thought) + rest for text, thought, rest in (
            (ANALYSIS, "hm", HARMONY), (ANALYSIS, "so", FINAL.format("15")), (ANALYSIS, "yes", FINAL.format("bye")))],
        [HARMONY, FINAL.format("15"), FINAL.format("bye")],
    ),
    "Nemotron 3": (
        [f"hm\n</think>\n{XML}\n{END}", f"so\n</think>\n15{END}", f"yes\n</think>\nbye{END}"],
        [f"\n{XML}\n{END}", f"15{END}", f"bye{END}"],
    ),
    "Kimi K2": ([KIMI_CALLS, "15<|im_end|>", "bye<|im_end|>"],) * 2,
    "Ministral 3": (
        [f"[THINK]hm[/THINK]{ARGS}", "[THINK]so[/THINK]15</s>", "[THINK]yes[/THINK]bye</s>"],
        [ARGS, "15</s>", "bye</s>"],
    ),
    "Gemma 4": (
        [f"{CHANNEL}hm\n<channel|>{GEMMA}", "so\n<channel|>15<turn|>\n", f"{CHANNEL}yes\n<channel|>bye<turn|>\n"],
        [GEMMA, "15<turn|>\n", "bye<turn|>\n"],
    ),
    "LFM2.5": (
        [f"<think>hm</think>{PYTHON}{END}", f"<think>so</think>15{END}", f"<think>yes</think>bye{END}"],
        [f"{PYTHON}{END}", f"15{END}", f"bye{END}"],
    ),
}  # fmt: skip
LEARNED["Qwen3.6"] = LEARNED["Qwen3.5"]
CALLS = {"Qwen3.5": "qwen3_coder", "Qwen3.6": "qwen3_coder", "Nemotron 3": "qwen3_coder", "GLM-4.5": "glm45"}
CALLS |= {"gpt-oss": "harmony", "Kimi K2": "kimi_k2", "Ministral 3": "mistral", "Gemma 4": "gemma4", "LFM2.5": "lfm2"}


def says(content, thoughts="", *calls):
    functions = [{"name": "look", "arguments": {"at": at}} for at in calls]
    called = [{"id": f"call0000{i}", "type": "function", "function": each} for i, each in enumerate(functions)]
    message = {"role": "assistant", "content": content}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": called} if called else {})


def result(text, number):
    return {"role": "tool", "name": "look", "tool_call_id": f"call0000{number}", "content": text}


def turns(thinks, calls="ab"):
    """Return calls, perhaps several, a response to their results, and one to another question."""
    thoughts = ("hm", "so", "yes") if thinks else ("", "", "")
    results = [result(text, i) for i, text in enumerate("78"[: len(calls)])]
    chat = [{"role": "user", "content": "q"}, says("", thoughts[0], *calls), *results, says("15", thoughts[1])]
    return [*chat, {"role": "user", "content": "thanks"}, says("bye", thoughts[2])]


def calls_of(name):
    return "a" if name == "gpt-oss" else "ab"


@pytest.fixture(scope="module")
def model(make_folder):
    made = {}

    def make(name):
        if name not in made:
            template, kinds = MODELS[name]
            made[name] = load_tokenizer(make_folder(template, **kinds))
        return made[name]

    return make


def learned(tokenizer, messages, tools=TOOLS):
    ((tokens, mask),) = encode_sft(tokenizer, [SftRow(messages=messages, where="row 1", tools=tools)])
    return tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])


@pytest.mark.parametrize("name", MODELS)
def test_each_response_is_learned_as_it_is_generated(model, name):
    """With thoughts in every response, in none, and in all but the first one."""
    tokenizer, calls, (thinking, plain) = model(name), calls_of(name), LEARNED[name]
    assert learned(tokenizer, turns(True, calls)) == "".join(thinking)
    assert learned(tokenizer, turns(False, calls)) == "".join(plain)
    mixed = [{"role": "user", "content": "p"}, says("no"), *turns(True, calls)]
    assert learned(tokenizer, mixed) == plain[2].replace("bye", "no") + "".join(thinking)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Kimi K2"])
def test_thoughts_within_the_content_are_learned_too(model, name):
    """Some templates show the content as it is written."""
    question = {"role": "user", "content": "q"}
    written = learned(model(name), [question, says("<think>\nyes\n</think>\n\nbye")], None)
    plain = f"yes\n</think>\n\nbye{END}"
    assert written == {"LFM2.5": f"<think>\n{plain}", "Nemotron 3": plain}.get(name, LEARNED[name][0][2])
    assert learned(model(name), [question, says("bye", "yes")], None) == LEARNED[name][0][2]


@pytest.mark.parametrize("name", MODELS)
def test_calls_of_a_response_are_read(model, name):
    dialogue, calls = Dialogue(model(name), TOOLS), calls_of(name)
    assert dialogue.calls == CALLS[name]
    for texts in LEARNED[name]:
        actual = read_calls(re.sub(r"(<\|call\|>|</s>|<\|im_end\|>\n?)$", "", texts[0]), CALLS[name], TOOLS)[1]
        assert [(call.name, call.arguments) for call in actual] == [("look", {"at": at}) for at in calls]


PAGE = Path(__file__).parents[2] / "docs/reference/data.md"


@pytest.mark.parametrize("name", MODELS)
def test_the_page_lists_each_model(model, name):
    tokenizer = model(name)
    training, chat = training_template(tokenizer), turns(True, calls_of(name))
    if training is None:
        kept = "has no thoughts" if loses_thoughts(tokenizer, chat, {}, TOOLS) else "its own template"
    else:
        kept = f"`{training.name.split()[-1] if 'chat_template' in training.options else next(iter(training.options))}`"
    row = f"| {name} | `{CALLS[name]}` | {'one' if name == 'gpt-oss' else 'several'} | {kept} |"
    assert row in PAGE.read_text().splitlines()


SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
CALLED = says("I look.", "", "it's") | {"tool_calls": [{"id": "functions.look:0", "type": "function", "function": {
    "name": "look", "arguments": {"at": "é", "on": True, "many": [1, 2], "deep": {"x": None}}}}]}  # fmt: skip
ENDED = [
    (SYSTEM, {"add_generation_prompt": True}),
    (SYSTEM, {"add_generation_prompt": True, "enable_thinking": False}),
    ([*SYSTEM, says("a\n\nb", "hm")], {}),
    ([*SYSTEM, says("a"), *SYSTEM[1:], says("b", "so")], {}),
    ([*SYSTEM, says("a", "hm"), *SYSTEM[1:], says("b")], {}),
    ([*SYSTEM, CALLED, result("7", 0) | {"tool_call_id": "functions.look:0"}], {"add_generation_prompt": True}),
    ([*SYSTEM, CALLED | {"reasoning_content": "hm"}, result("7", 0), says("c")], {}),
]
# by the published templates: TRL 1.16.0's copies of Nemotron 3 Nano and LFM2.5-230M, llama.cpp's of Ministral 3 14B
# Reasoning, and of Kimi K2 Instruct with ids of calls as Moonshot's has them
DIGESTS = {
    "Nemotron 3": "d5a1c91f86ae 4802856101dc ba4fb70e3092 b992883569b1 25e4656308b2 1a429910d7f4 e88a1c185344",
    "Kimi K2": "8b845d0a4913 8b845d0a4913 8eb0b0ba6036 f9d04dd50145 f9d04dd50145 b1b02bebef99 29592547d4ba",
    "Ministral 3": "fe6056f85f51 fe6056f85f51 9f12d492a594 7a13cbdc2be3 41b6b687ea8c ff9c708378b7 7af5e458f817",
    "LFM2.5": "d4acaa4ccf72 d4acaa4ccf72 1a0375bdc38a dd566092cb3a 5358c2164b8a f2c911e1a434 4f3a9033d999",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_the_templates_here_render_as_the_published_ones(model, name):
    assert rendered_digests(model(name)) == DIGESTS[name].split()


def rendered_digests(tokenizer):
    texts = [try_text(tokenizer, chat, **options) for chat, options in ENDED]
    return [hashlib.sha256((text or "").encode()).hexdigest()[:12] for text in texts]
