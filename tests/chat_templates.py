"""Chat templates as families publish them, written anew as far as turns and tools go, and some that are hostile."""

from aligner.data.shipped_templates import shipped_template

_HERMES_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>\n' }}{% for t in tools %}{{ t | tojson }}{{ '\n' }}"
    '{% endfor %}{{ \'</tools>\nA call is <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n\' }}'
    "{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}{{ '<tool_call>\n{\"name\": \"' }}"
    "{{ c.function.name }}{{ '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}"
)
_RESULT = (
    "{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}{{ '\n<tool_response>\n' + m.content + "
    "'\n</tool_response>' }}{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}"
)
_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
QWEN2 = (
    _HERMES_TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}" + _RESULT + "{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}" + _CALLS + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}" + _OPEN
)
# as Qwen3's: thoughts stay behind the last question of a user alone
QWEN3 = QWEN2.replace(
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}",
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}{% set at = namespace(i=-1) %}"
    "{% for n in messages %}{% if n == last %}{% set at.i = loop.index0 %}{% endif %}{% endfor %}"
    "{% set parts = m.content.split('</think>') %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if parts | length > 1 and loop.index0 > at.i %}{{ '<think>\n' + parts[0].split('<think>')[-1].strip('\n') + "
    "'\n</think>\n\n' }}{% endif %}{{ parts[-1].lstrip('\n') }}",
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\nRespond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\n\n\' }}'
    "{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% set c = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{ c.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}"
    "{{ '<|eot_id|>' }}{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# as Mistral's: roles must alternate, so that a call is one only as `tool_calls`
MISTRAL = (
    "{{ '<s>' }}{% set ns = namespace(i=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' "
    "and not m.tool_calls) %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}"
    "{{ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls %}"
    "{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}"
    "{{ c.function.arguments | tojson }}{{ ', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ ']</s>' }}{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' }}{{ m.content }}"
    "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}{% else %}{{ ' ' + m.content + '</s>' }}"
    "{% endif %}{% endfor %}"
)
# the last words of an answer are cut, spaces are doubled, or nothing of it stays as it was
TRIMS = QWEN2.replace("+ m.content }}", "+ (m.content | trim) }}", 1)
SHOUTS = QWEN2.replace("+ m.content }}", "+ (m.content | upper if m.role == 'assistant' else m.content) }}", 1)
FORGETS = QWEN2.replace("{% for m in messages %}", "{% for m in messages[-4:] %}", 1)

_ROWS = "{% set opened = messages[0].role == 'system' %}"
_REST = "{% for m in (messages[1:] if opened else messages) %}"
_LATER = "(messages[1:] if opened else messages)[loop.index:] | selectattr('role', 'equalto', 'user') | list"
NEMOTRON3 = (
    _ROWS
    + "<|im_start|>system\n{{ messages[0].content if opened else '' }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "<|im_end|>\n{% set all = (truncate_history_thinking is defined and not truncate_history_thinking) %}" + _REST + ""
    "{% if m.role == 'assistant' %}{% set c = m.content or '' %}{% if m.reasoning_content %}"
    "{% set c = '<think>\n' + m.reasoning_content + '\n</think>\n' + c %}"
    "{% elif '<think>' not in c and '</think>' not in c %}{% set c = '<think></think>' + c %}{% endif %}"
    "{% if " + _LATER + " and not all %}{% set c = '<think></think>' + c.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>assistant\n{{ c | trim }}{{ '\n' if m.tool_calls }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>\n' }}{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n' if loop.previtem.role != 'tool' }}<tool_response>\n"
    "{{ m.content }}"
    "{{ '\n</tool_response>\n' }}{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "<|im_start|>assistant\n<think>{{ '\n' if enable_thinking | default(true) else '</think>' }}{% endif %}"
)
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are "
    "Kimi, an AI assistant created by Moonshot AI.<|im_end|>{% endif %}"
    "<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>"
    "{{ m.name or m.role }}<|im_middle|>{{ '## Return of ' + m.tool_call_id + '\n' if m.role == 'tool' }}"
    "{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# thoughts are an entry of a list of contents
MINISTRAL3 = (
    _ROWS + "{{ bos_token }}[SYSTEM_PROMPT]{{ messages[0].content if opened else 'Think.' }}[/SYSTEM_PROMPT]"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% set ns = namespace(i=0) %}"
    + _REST
    + "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}" + _REST + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{% if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}"
    "{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}{% if b.type == 'text' %}{{ b.text }}"
    "{% elif b.type == 'thinking' %}[THINK]{{ b.thinking }}[/THINK]{% else %}{{ raise_exception('a content') }}"
    "{% endif %}"
    "{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    "{{ m.content }}[/TOOL_RESULTS]{% else %}{{ raise_exception('role ' + m.role) }}{% endif %}{% endfor %}"
)
LFM2_5 = (
    "{% macro value(v) %}{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}{% else %}{{ v | string }}"
    "{% endif %}{% endmacro %}" + _ROWS + "{{ bos_token }}{% set system = messages[0].content if opened else '' %}"
    "{% if tools %}{% set system = system + ('\n' if system else '') + 'List of tools: ' + (tools | tojson) %}"
    "{% endif %}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' if system }}" + _REST + "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{% set keeps = preserve_thinking or not (" + _LATER + ") %}"
    "{% set thoughts = m.thinking or m.reasoning_content %}"
    "{{ '<think>' + thoughts + '</think>' if thoughts and keeps }}"
    "{{ m.content if keeps or '</think>' not in m.content else m.content.split('</think>')[-1] | trim }}"
    "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}="
    "{{ value(v) }}{% endfor %}){% endfor %}]<|tool_call_end|>{% endif %}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3 for training": shipped_template("qwen3"),
    "qwen3_thinking for training": shipped_template("qwen3_thinking"),
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "trims": TRIMS,
    "shouts": SHOUTS,
    "forgets": FORGETS,
}
WITHOUT_TOOLS = {"chatml": shipped_template("chatml"), "phi3": shipped_template("phi3")}
SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[TOOL_CALLS]", "</s>")
SPECIAL += ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
SPECIAL += (
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    '<|"|>',
)
ENDS = {
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma4 for training": "<|tool_response>",
}  # of an answer; of the others <|im_end|>
