"""Chat templates in the manner of well-known model families, which treat a message as the originals do."""

from __future__ import annotations

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is defined and tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- 'Today: ' + (date_string if date_string is defined else 'unknown') + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in rest %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""  # noqa: E501 (as such templates are written)

QWEN = """\
{%- set ns = namespace(last_question=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last_question < 0 and message.role == "user" %}{% set ns.last_question = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last_question %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string %}{% generation %}{{ message['content'] | trim }}{% endgeneration %}{% endif %}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""  # noqa: E501

QWEN3 = """\
{%- set ns = namespace(last_question=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set parts = content.split('</think>') %}
            {%- set thoughts = parts[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = parts[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_question and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA4 = """\
{%- macro written(value) -%}
    {%- if value is string -%}<|"|>{{ value }}<|"|>
    {%- elif value is boolean or value is none -%}{{ value | tojson }}
    {%- elif value is mapping -%}
        { {%- for key, each in value | dictsort -%}{{ key }}:{{ written(each) }}{{ ',' if not loop.last }}{%- endfor -%} }
    {%- elif value is sequence -%}
        [{%- for each in value -%}{{ written(each) }}{{ ',' if not loop.last }}{%- endfor -%}]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(asks=true) -%}
{%- set thinks = enable_thinking | default(false) -%}
{%- if thinks or tools -%}
    {{- '<|turn>system\n' + ('<|think|>\n' if thinks else '') -}}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' + tool.function.name + written(tool.function.parameters) + '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|tool_response>response:' + message.get('name', 'unknown') -}}
        {{- written({'value': message.content}) + '<tool_response|>' -}}
        {%- set ns.asks = false -%}
    {%- else -%}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
        {%- if message.get('reasoning_content') -%}
            {{- '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' -}}
        {%- endif -%}
        {%- set shown -%}{{- message.content or '' -}}{%- endset -%}
        {{- shown | trim -}}
        {%- for call in message.get('tool_calls') or [] -%}
            {%- if call.function.arguments is string -%}{{ raise_exception('an object, please') }}{%- endif -%}
            {{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' -}}
        {%- else -%}
            {{- '<turn|>\n' -}}
        {%- endfor -%}
        {%- set ns.asks = true -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.asks -%}
    {{- '<|turn>model\n' + ('' if thinks else '<|channel>thought\n<channel|>') -}}
{%- elif add_generation_prompt and thinks -%}
    {{- '<|channel>thought\n' -}}
{%- endif -%}
"""  # noqa: E501
"""Writes calls, reasoning and results as Gemma 4 does."""

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with a system message of its own."""

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- 'You may call these:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall so: <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{% endif %}
{%- endif %}
"""
"""Knows tools, in the form that Hermes and Qwen take, and opens reasoning where it is asked to."""

THINKING_HERMES = HERMES + "{# </think> #}"
"""Speaks of reasoning, so that it is told apart."""

TEMPLATES = {
    "llama3": LLAMA3,
    "qwen": QWEN,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma4": GEMMA4,
    "smollm2": SMOLLM2,
}
