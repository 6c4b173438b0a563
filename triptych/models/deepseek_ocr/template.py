"""The chat template of DeepSeek-OCR and DeepSeek-OCR-2, whose published files have none.

Their code's format is plain: texts follow each other, and an image's placeholder is on a line of its own.
"""

TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ("image", "image_url") -%}
{{- "<image>\\n" -}}
{%- elif part.type == "text" -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""
