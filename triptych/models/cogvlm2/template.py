"""CogVLM2's chat template: that of ``build_conversation_input_ids`` in its published code.

The tokenizer's files have Llama 3's, which the model wasn't trained with. The image comes first, whichever message it
is a part of.
"""

IMAGE = "<|image|>"
"""What the template has for an image: the placeholder's token is a reserved one of Llama 3."""
TEMPLATE = (
    """\
{{- bos_token -}}
{%- for message in messages if message.content is not string -%}
{%- for part in message.content if part.type in ("image", "image_url") -%}
{{- \""""
    + IMAGE
    + """\" -}}
{%- endfor -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role not in ("user", "assistant") -%}
{{- raise_exception("CogVLM2's conversations have messages of user and assistant alone") -}}
{%- endif -%}
{{- "Question: " if message.role == "user" else " " -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content if part.type == "text" -%}
{{- part.text -}}
{%- endfor -%}
{%- endif -%}
{{- " Answer:" if message.role == "user" else "\\n" -}}
{%- endfor -%}
"""
)
