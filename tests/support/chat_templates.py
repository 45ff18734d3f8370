"""Chat templates in the manner of several model families, with what matters to tools."""

from __future__ import annotations

HERMES = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Calls go between <tool_call> and </tool_call>.<|im_end|>
{% endif -%}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not (loop.first and tools and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

THINKING = (
    HERMES
    + """\
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""
)
"""Reasons by itself; enable_thinking=False stops that."""

OPENED = (
    HERMES
    + """\
{%- if add_generation_prompt %}<think>
{% endif %}"""
)
"""The prompt begins the reasoning."""

MISTRAL = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Ids have nine characters.') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, \
"id": "{{ call.id }}"}
{%- endfor -%}]
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}"""

LLAMA3 = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>ipython
{{ {'output': m.content} | tojson }}<|im_end|>
{%- elif 'tool_calls' in m %}<|im_start|>assistant
{"name": "{{ m.tool_calls[0].function.name }}", \
"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>
{%- else %}<|im_start|>{{ m.role }}
{% if tools and m.role == 'user' %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ m.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PYTHONIC = """\
{%- if tools %}<|im_start|>system
Call functions like this: [func_name1(param=value), func_name2()]
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

OTHER = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
Write <tool_call><function=name><parameter=a>value</parameter></function></tool_call>
{% endfor %}
{%- for m in messages %}{{ m.content }}{% endfor %}"""
"""Knows tools, but writes calls in a form of its own."""
