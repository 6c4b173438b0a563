"""Chat templates that behave as those of released models do, in this project's own words.

Each has what decides how conversations are accepted: which roles it knows, where system messages may be, whether it
demands that roles alternate, how it shows contents, calls and results, and what it raises.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triptych.errors import InvalidRequest
from triptych.prompt.fitting import Fitter, name_message, place_of
from triptych.prompt.formats.hermes import Hermes
from triptych.prompt.template import ChatTemplate
from triptych.prompt.template_forms import PROBE_TOOLS, find_forms

Message = Mapping[str, Any]

_ROLES = "{%- for message in messages -%}"
_END = "{%- endfor -%}"
_PARTS = (
    "{%- macro show(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' -%}<|image|>{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
_CHATML = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
_CHATML_PROMPT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
_JSON_CALLS = (
    "{%- for call in message.tool_calls or [] -%}{%- set call = call.function -%}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' -}}'
    "{%- if call.arguments is string -%}{{- call.arguments -}}{%- else -%}{{- call.arguments | tojson -}}{%- endif -%}"
    "{{- '}\\n</tool_call>' -}}{%- endfor -%}"
)
_TOOLS = "{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}"
_ALTERNATE = (
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}{%- endif -%}"
)

ODD_TEMPLATES = {
    # a user's content is a list, all others are strings; a result has its function's name
    "forms by role": _TOOLS + _ROLES + "{{- '<|' + message.role + '|>' -}}{%- if message.role == 'user' -%}"
    "{%- for part in message.content -%}{{- part.text if part.type == 'text' else '<|image|>' -}}{%- endfor -%}"
    "{%- elif message.role == 'tool' -%}{{- message.name + ': ' + message.content -}}"
    "{%- else -%}{{- message.content + '' -}}{%- endif -%}" + _JSON_CALLS + _END + _CHATML_PROMPT,
    # the reverse, and results that are lists, too
    "strings of users": _ROLES + "{{- '<|' + message.role + '|>' -}}{%- if message.role in ['user', 'system'] -%}"
    "{{- message.content + '' -}}{%- else -%}{%- for part in message.content or [] -%}{{- part['text'] -}}"
    "{%- endfor -%}{%- endif -%}" + _JSON_CALLS + _END + _CHATML_PROMPT,
    # a conversation must begin with a system message
    "system first": _PARTS
    + "{%- if messages[0].role != 'system' -%}{{- raise_exception('No system') -}}{%- endif -%}"
    + _ROLES
    + "{{- '<|' + message.role + '|>' + show(message.content or '') -}}"
    + _JSON_CALLS
    + _END,
    # the system's text is in the last message, if that is the user's
    "system last": "{%- set said = namespace(text='') -%}" + _ROLES + "{%- if message.role == 'system' -%}"
    "{%- set said.text = said.text + message.content -%}{%- else -%}{{- '<|' + message.role + '|>' -}}"
    "{%- if loop.last and message.role == 'user' -%}{{- said.text -}}{%- endif -%}{{- message.content -}}"
    "{%- endif -%}" + _END,
}
"""Templates with rules that no released one has in this combination."""
TEMPLATES = {
    # a string in every role; results within a user's turn; reasoning of the last answer
    "qwen3": _TOOLS + _ROLES + "{%- set content = message.content if message.content is string else '' -%}"
    "{%- if message.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- set thought = message.reasoning_content or '' -%}"
    "{%- if '</think>' in content -%}{%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
    "{%- if loop.last -%}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- content -}}" + _JSON_CALLS + "{{- '<|im_end|>\\n' -}}"
    "{%- elif message.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}{%- endif -%}"
    + _END
    + _CHATML_PROMPT,
    # lists and strings; a system message at the beginning alone; arguments as an object
    "qwen3.5": _PARTS + _TOOLS + _ROLES + "{%- if message.role == 'system' and not loop.first -%}"
    "{{- raise_exception('System message must be at the beginning.') -}}{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + show(message.content) -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}"
    "{%- for name, value in call.function.arguments | items -%}"
    "{{- '<parameter=' + name + '>\\n' ~ value ~ '\\n</parameter>\\n' -}}{%- endfor -%}"
    "{{- '</function>\\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}" + _END + _CHATML_PROMPT,
    # lists and strings in every role, no tools
    "qwen2-vl": _PARTS
    + _ROLES
    + "{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}"
    + _END
    + _CHATML_PROMPT,
    # a system message within the first user's turn; roles alternate; no calls
    "llama2": "{%- if messages[0].role == 'system' -%}{%- set system = '<<SYS>>\\n' + messages[0].content + "
    "'\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}{%- else -%}{%- set system = '' -%}"
    "{%- set turns = messages -%}{%- endif -%}{%- for message in turns -%}"
    + _ALTERNATE
    + "{%- if message.role == 'user' -%}"
    "{{- bos_token + '[INST] ' + (system if loop.first else '') + message.content.strip() + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + message.content.strip() + ' ' + eos_token -}}{%- endif -%}" + _END,
    # any order of roles; one call a message
    "llama3": _TOOLS + _ROLES + "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}"
    "{%- if message.tool_calls -%}{%- if message.tool_calls | length != 1 -%}"
    "{{- raise_exception('This model only supports single tool-calls at once!') -}}{%- endif -%}"
    "{%- set call = message.tool_calls[0].function -%}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' -}}"
    "{%- elif message.role == 'tool' -%}{%- if message.content is mapping or message.content is iterable -%}"
    "{{- message.content | tojson -}}{%- else -%}{{- message.content -}}{%- endif -%}"
    "{%- else -%}{{- message.content | trim -}}{%- endif -%}{{- '<|eot_id|>' -}}"
    + _END
    + "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}",
    # lists; the system message's first text alone; short ids; roles alternate but for calls and results
    "mistral-small-3": "{%- if messages[0].role == 'system' -%}{%- set turns = messages[1:] -%}"
    "{{- '[SYSTEM_PROMPT]' -}}{%- if messages[0].content is string -%}{{- messages[0].content -}}"
    "{%- else -%}{{- messages[0].content[0].text -}}{%- endif -%}{{- '[/SYSTEM_PROMPT]' -}}"
    "{%- else -%}{%- set turns = messages -%}{%- endif -%}{%- set state = namespace(user=true) -%}"
    "{%- for message in turns -%}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}"
    "{%- if (message.role == 'user') != state.user -%}"
    "{{- raise_exception('After the optional system message, conversation roles must alternate') -}}{%- endif -%}"
    "{%- set state.user = not state.user -%}{%- endif -%}"
    "{%- if message.role == 'user' -%}{{- '[INST]' -}}{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}"
    "{{- part.text if part.type == 'text' else '[IMG]' -}}{%- endfor -%}{%- endif -%}{{- '[/INST]' -}}"
    "{%- elif message.tool_calls -%}{%- for call in message.tool_calls -%}{%- if call.id | length != 9 -%}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') -}}{%- endif -%}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' -}}"
    "{%- if call.function.arguments is string -%}{{- call.function.arguments -}}{%- else -%}"
    "{{- call.function.arguments | tojson -}}{%- endif -%}{%- endfor -%}{{- eos_token -}}"
    "{%- elif message.role == 'tool' -%}"
    "{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content | string + '[/TOOL_RESULTS]' -}}"
    "{%- elif message.role == 'assistant' -%}{{- message.content + eos_token -}}"
    "{%- else -%}{{- raise_exception('Only user, assistant, system and tool roles are supported') -}}{%- endif -%}"
    + _END,
    # no system role; roles alternate
    "gemma2": "{{- bos_token -}}{%- if messages[0].role == 'system' -%}"
    "{{- raise_exception('System role not supported') -}}{%- endif -%}"
    + _ROLES
    + _ALTERNATE
    + "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}"
    "{{- message.content | trim "
    "+ '<end_of_turn>\\n' -}}"
    + _END
    + "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}",
    # the system message before the first user's text; lists; roles alternate
    "gemma3": "{{- bos_token -}}{%- if messages[0].role == 'system' -%}{%- set turns = messages[1:] -%}"
    "{%- if messages[0].content is string -%}{%- set prefix = messages[0].content + '\\n\\n' -%}{%- else -%}"
    "{%- set prefix = messages[0].content[0].text + '\\n\\n' -%}{%- endif -%}"
    "{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}{%- for message in turns -%}"
    + _ALTERNATE
    + "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}"
    "{{- prefix if loop.first else '' -}}{%- if message.content is string -%}{{- message.content | trim -}}"
    "{%- else -%}{%- for part in message.content -%}{%- if part.type == 'image' -%}{{- '<start_of_image>' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text | trim -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<end_of_turn>\\n' -}}"
    + _END
    + "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}",
    # strings joined with tags; no calls
    "phi3": _ROLES + "{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}" + _END,
    # calls need a content of none, and arguments as text
    "deepseek-v3": _TOOLS + "{{- bos_token -}}{%- set all = namespace(system='') -%}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{%- set all.system = all.system + message.content -%}{%- endif -%}"
    "{%- endfor -%}{{- all.system -}}"
    + _ROLES
    + "{%- if message.role == 'user' -%}{{- '<|User|>' + message.content -}}"
    "{%- elif message.role == 'assistant' and message.content is none -%}{%- for call in message.tool_calls -%}"
    "{{- '<|tool_call_begin|>' + call.type + '<|tool_sep|>' + call.function.name + '\\n```json\\n' "
    "+ call.function.arguments + '\\n```<|tool_call_end|>' -}}{%- endfor -%}"
    "{%- elif message.role == 'assistant' -%}"
    "{{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end_of_sentence|>' -}}"
    "{%- elif message.role == 'tool' -%}{{- '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' -}}"
    "{%- endif -%}" + _END + "{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}",
    # the first message's instructions; one call a message; text beside calls is
    # reasoning, left out once there is an answer; a result needs a call before it
    "gpt-oss": _TOOLS + "{%- if messages[0].role in ('system', 'developer') -%}"
    "{{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' -}}{%- endif -%}"
    "{%- set last = namespace(name=none) -%}" + _ROLES + "{%- if message.role == 'assistant' and message.tool_calls -%}"
    "{%- if message.content and not "
    "messages[loop.index:] | rejectattr('tool_calls') | selectattr('role', 'equalto', 'assistant') | list -%}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' -}}"
    "{%- endif -%}{%- set call = message.tool_calls[0].function -%}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' "
    "+ call.arguments | tojson + '<|call|>' -}}{%- set last.name = call.name -%}"
    "{%- elif message.role == 'assistant' -%}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}"
    "{%- elif message.role == 'tool' -%}{%- if last.name is none -%}"
    "{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') -}}"
    "{%- endif -%}{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' "
    "+ message.content | tojson + '<|end|>' -}}"
    "{%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}{%- endif -%}"
    + _END
    + "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}",
    # names are shown; strings and lists
    "kimi-k2": _PARTS + _TOOLS + _ROLES + "{%- set name = message.get('name') or message.role -%}"
    "{{- '<|im_' + message.role + '|>' + name + '<|im_middle|>' -}}"
    "{%- if message.role == 'tool' -%}{{- '## Return of ' + message.tool_call_id + '\\n' -}}{%- endif -%}"
    "{{- show(message.content) if message.content else '' -}}{%- for call in message.tool_calls or [] -%}"
    "{{- '<|tool_call_begin|>' + call.id + ':' + call.function.name + '<|tool_call_argument_begin|>' -}}"
    "{%- if call.function.arguments is string -%}{{- call.function.arguments -}}{%- else -%}"
    "{{- call.function.arguments | tojson -}}{%- endif -%}{{- '<|tool_call_end|>' -}}{%- endfor -%}"
    "{{- '<|im_end|>' -}}" + _END,
    # an image before the text; lists alone, users and assistants by name; no tools
    "smolvlm": _ROLES + "{{- message.role | capitalize + ': ' -}}{%- for part in message.content -%}"
    "{{- part.text if part.type == 'text' else '<image>' -}}{%- endfor -%}{{- '<end_of_utterance>\\n' -}}"
    + _END
    + "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}",
    # images first, then the texts of a list; nothing of results
    "llava": _ROLES + "{%- if message.role in ('user', 'assistant') -%}{{- message.role | upper + ': ' -}}"
    "{%- for part in message.content if part.type == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}"
    "{%- for part in message.content if part.type == 'text' -%}{{- part.text + ' ' -}}{%- endfor -%}{%- endif -%}"
    + _END
    + "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}",
    # what a list begins with decides how its role is written; lists alone, no tools
    "idefics3": "<|im_start|>"
    + _ROLES
    + "{{- message.role | capitalize + (':' if message.content[0].type == 'image' else ': ') -}}"
    "{%- for part in message.content -%}{{- part.text if part.type == 'text' else '<image>' -}}{%- endfor -%}"
    "{{- '<end_of_utterance>\n' -}}" + _END + "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}",
    # a plain ChatML, as of Hermes and InternLM2
    "chatml": _ROLES + _CHATML + _END + _CHATML_PROMPT,
    # the same; another template is for tools
    "hermes": _ROLES + _CHATML + _END + _CHATML_PROMPT,
    # calls and results with observations; strings
    "glm4": _TOOLS + "[gMASK]<sop>" + _ROLES + "{%- if message.role == 'tool' -%}"
    "{{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}{%- else -%}"
    "{{- '<|' + message.role + '|>\\n' + (message.content if message.content is string else '') -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '\\n<tool_call>' + call.function.name -}}"
    "{%- for name, value in call.function.arguments.items() -%}"
    "{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' -}}"
    "{{- value if value is string else value | tojson -}}{{- '</arg_value>' -}}{%- endfor -%}"
    "{{- '\\n</tool_call>' -}}{%- endfor -%}{%- endif -%}"
    + _END
    + "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}",
    # strings and lists; reasoning of the last answers; results that follow each other share a turn
    "glm4.5": _PARTS + "[gMASK]<sop>" + _TOOLS + _ROLES + "{%- if message.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}"
    "{{- '\n<tool_response>\n' + show(message.content) + '\n</tool_response>' -}}{%- else -%}"
    "{{- '<|' + message.role + '|>\n' -}}{%- set content = show(message.content or '') -%}"
    "{%- if message.role == 'assistant' -%}{%- set thought = message.reasoning_content or '' -%}"
    "{%- if '</think>' in content -%}{%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}"
    "{%- set content = content.split('</think>')[-1] -%}{%- endif -%}"
    "{{- '<think>' + thought | trim + '</think>\n' + content | trim -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '\n<tool_call>' + call.function.name + '\n' -}}"
    "{%- for name, value in call.function.arguments.items() -%}{{- '<arg_key>' + name + '</arg_key>\n<arg_value>' -}}"
    "{{- value if value is string else value | tojson -}}{{- '</arg_value>\n' -}}{%- endfor -%}"
    "{{- '</tool_call>' -}}{%- endfor -%}{%- else -%}{{- content -}}{%- endif -%}{%- endif -%}"
    + _END
    + "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}",
    # the first system message apart; results that follow each other are one user's turn; strings
    "qwen3-coder": "{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}"
    "{%- if messages[0].role == 'system' -%}{{- '<|im_start|>system\n' + messages[0].content -}}"
    + _TOOLS
    + "{{- '<|im_end|>\n' -}}{%- elif tools -%}"
    + _TOOLS
    + "{%- endif -%}{%- for message in turns -%}{%- if message.role == 'tool' -%}"
    "{%- if not loop.previtem or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user\n' -}}{%- endif -%}"
    "{{- '<tool_response>\n' + message.content + '\n</tool_response>\n' -}}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- elif message.tool_calls -%}{{- '<|im_start|>assistant' -}}"
    "{%- if message.content is string and message.content | trim -%}{{- '\n' + message.content | trim + '\n' -}}"
    "{%- endif -%}{%- for call in message.tool_calls -%}"
    "{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' -}}"
    "{%- for name, value in call.function.arguments | items -%}{{- '<parameter=' + name + '>\n' -}}"
    "{{- value | tojson if value is mapping or value is sequence and value is not string else value | string -}}"
    "{{- '\n</parameter>\n' -}}{%- endfor -%}{{- '</function>\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- else -%}" + _CHATML + "{%- endif -%}" + _END + _CHATML_PROMPT,
    # the system message before the last user's text, if that is the last message; text or calls; ids of nine characters
    "mistral-7b-v0.3": "{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}"
    "{%- set turns = messages[1:] -%}{%- else -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- set state = namespace(user=true) -%}{%- for message in turns -%}"
    "{%- if message.role != 'tool' and not message.tool_calls -%}{%- if (message.role == 'user') != state.user -%}"
    "{{- raise_exception('After the optional system message, conversation roles must alternate') -}}{%- endif -%}"
    "{%- set state.user = not state.user -%}{%- endif -%}{%- endfor -%}{%- for message in turns -%}"
    "{%- if message.role == 'user' -%}{%- if tools -%}{{- tools | tojson -}}{%- endif -%}"
    "{{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' -}}"
    "{%- elif message.tool_calls -%}{{- '[TOOL_CALLS] [' -}}{%- for call in message.tool_calls -%}"
    "{%- if call.id | length != 9 -%}{{- raise_exception('IDs should be of length 9!') -}}{%- endif -%}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' -}}{%- endfor -%}{{- ']' + eos_token -}}"
    "{%- elif message.role == 'assistant' -%}{{- ' ' + message.content | trim + eos_token -}}"
    "{%- elif message.role == 'tool' -%}{%- if message.tool_call_id | length != 9 -%}"
    "{{- raise_exception('IDs should be of length 9!') -}}{%- endif -%}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content | string + '}[/TOOL_RESULTS]' -}}"
    "{%- else -%}{{- raise_exception('Only user and assistant roles are supported') -}}{%- endif -%}" + _END,
    # no message may be empty; ids may be longer than nine characters
    "ministral-3": _PARTS + "{%- set state = namespace(user=true) -%}" + _ROLES + "{%- if message.role != 'system' and "
    "not message.content and not message.tool_calls -%}{{- raise_exception('must have a string') -}}{%- endif -%}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}"
    "{%- if (message.role == 'user') != state.user -%}{{- raise_exception('conversation roles must alternate') -}}"
    "{%- endif -%}{%- set state.user = not state.user -%}{%- endif -%}"
    "{%- if message.role == 'system' and not loop.first -%}{{- raise_exception('Only user, assistant, tool') -}}"
    "{%- endif -%}{{- '[' + message.role + ']' + show(message.content) -}}{%- for call in message.tool_calls or [] -%}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' -}}{%- if call.function.arguments is string -%}"
    "{{- call.function.arguments -}}{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}{%- endfor -%}"
    + _END
    + "{%- if tools -%}{%- endif -%}",
    # calls and results count as turns
    "gemma3 with tools": _TOOLS
    + _ROLES
    + "{%- if (message.role in ('user', 'tool', 'system')) != (loop.index0 % 2 == 0) "
    "-%}{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}{%- endif -%}"
    "{{- '<start_of_turn>' + message.role + '\\n' + message.content | trim -}}{%- if message.tool_calls -%}{{- '[' -}}"
    "{%- for call in message.tool_calls -%}{{- call.function.name + '(' -}}"
    "{%- for name in call.function.arguments -%}{{- name + '=' + call.function.arguments[name] | tojson -}}"
    "{%- endfor -%}{{- ')' -}}{%- endfor -%}{{- ']' -}}{%- endif -%}{{- '<end_of_turn>\\n' -}}" + _END,
    # lists and strings; calls beside texts
    "llama4": _PARTS + _TOOLS + _ROLES + "{{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' -}}"
    '{{- show(message.content) -}}{%- for call in message.tool_calls or [] -%}{{- \'{"name": "\' + call.function.name '
    "+ '\", \"parameters\": ' + call.function.arguments | tojson + '}' -}}{%- endfor -%}{{- '<|eot|>' -}}" + _END,
    # tools as JSON on the system message; no calls
    "phi4-mini": _ROLES
    + "{{- '<|' + message.role + '|>' + message.content -}}{%- if message.role == 'system' and 'tools' in message "
    "and message.tools is not none -%}{{- '<|tool|>' + message.tools + '<|/tool|>' -}}{%- endif -%}{{- '<|end|>' -}}"
    + _END,
    # text or calls
    "phi4-multimodal": _TOOLS + _ROLES + "{{- '<|' + message.role + '|>' -}}"
    "{%- if message.content -%}{{- message.content -}}"
    "{%- elif message.tool_calls -%}{{- '<|tool_call|>' -}}{%- for call in message.tool_calls -%}"
    "{{- call.function | tojson -}}{%- endfor -%}{{- '<|/tool_call|>' -}}{%- endif -%}{{- '<|end|>' -}}" + _END,
    # the system message first; calls between plugin tags, beside texts
    "internlm2.5": _ROLES + "{%- if message.role == 'system' and not loop.first -%}{{- raise_exception('Only user') -}}"
    "{%- endif -%}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}"
    '{%- for call in message.tool_calls or [] -%}{{- \'<|action_start|><|plugin|>\\n{"name": "\' + call.function.name '
    "+ '\", \"parameters\": ' + call.function.arguments | tojson + '}<|action_end|>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}" + _END + "{%- if tools -%}{%- endif -%}" + _CHATML_PROMPT,
    # results where the calls are, by their ids; arguments as an object
    "gemma4": _PARTS + _TOOLS + _ROLES + "{%- if message.role != 'tool' -%}{{- '<|turn>' + message.role + '\\n' -}}"
    "{%- set first = loop.index0 -%}{%- for call in message.tool_calls or [] -%}"
    "{{- '<|tool_call>call:' + call.function.name + '{' -}}{%- if call.function.arguments is mapping -%}"
    "{%- for name, value in call.function.arguments | dictsort -%}{{- name ~ ':' ~ value -}}{%- endfor -%}{%- endif -%}"
    "{{- '}<tool_call|>' -}}{%- endfor -%}{%- if message.tool_calls -%}{%- set state = namespace(open=true) -%}"
    "{%- for follow in messages[first + 1:] -%}{%- if follow.role != 'tool' -%}{%- set state.open = false -%}"
    "{%- elif state.open -%}{{- '<|tool_response>' + show(follow.content) + '<tool_response|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- show(message.content) + '<turn|>\\n' -}}{%- endif -%}" + _END,
    # a result needs a call before it
    "minimax-m2": _PARTS
    + _TOOLS
    + "{%- set last = namespace(calls=false) -%}"
    + _ROLES
    + "{%- if message.role == 'tool' and not last.calls -%}{{- raise_exception('Message has tool role, but') -}}"
    "{%- endif -%}{%- if message.role == 'assistant' -%}{%- set last.calls = message.tool_calls | length > 0 -%}"
    "{%- endif -%}{{- ']~b]' + message.role + '\\n' + show(message.content) -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<invoke name=\"' + call.function.name + '\">\\n' -}}"
    "{%- for name, value in call.function.arguments.items() -%}{{- '<parameter name=\"' + name + '\">' -}}"
    "{{- value if value is string else value | tojson -}}{{- '</parameter>\\n' -}}{%- endfor -%}"
    "{{- '</invoke>\\n' -}}{%- endfor -%}{{- '[e~[\\n' -}}" + _END,
    # system messages at the beginning, wherever they are; texts and calls
    "deepseek-v3.1": "{%- for message in messages if message.role == 'system' -%}{{- message.content -}}"
    + _END
    + _TOOLS
    + _ROLES
    + "{%- if message.role == 'user' -%}{{- '<|User|>' + message.content -}}"
    "{%- elif message.role == 'assistant' -%}{{- '<|Assistant|></think>' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<|tool_call_begin|>' + call.function.name + '<|tool_sep|>' "
    "+ call.function.arguments + '<|tool_call_end|>' -}}{%- endfor -%}{{- '<|end_of_sentence|>' -}}"
    "{%- elif message.role == 'tool' -%}{{- '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' -}}"
    "{%- endif -%}" + _END,
    # calls for requests with tools alone
    "hunyuan": _ROLES
    + "{{- '<|' + message.role + '|>' + (message.content or '') -}}{%- if tools -%}"
    + _JSON_CALLS
    + "{%- endif -%}"
    + _END,
    # calls by role; strings; the last result's images
    "minicpm-v": _TOOLS + _ROLES + "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- endif -%}"
    + _JSON_CALLS
    + "{{- '<|im_end|>\\n' -}}"
    + _END
    + _CHATML_PROMPT,
}

TOOL_TEMPLATES = {
    # plain without tools; with them, calls as JSON and results of a role of their own
    "hermes": "{{- bos_token + '<|im_start|>system\nTools: ' -}}"
    + _TOOLS
    + "{{- '<|im_end|>\n' -}}"
    + _ROLES
    + "{{- '<|im_start|>' + message.role -}}{%- if message.role == 'tool' -%}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}"
    "{%- elif message.tool_calls -%}{{- '\n' + message.content if message.content else '' -}}"
    + _JSON_CALLS
    + "{%- else -%}{{- '\n' + message.content -}}{%- endif -%}{{- '<|im_end|>\n' -}}"
    + _END
    + _CHATML_PROMPT
}
"""Templates named ``tool_use`` beside those of TEMPLATES."""


def serve(template: ChatTemplate, fitter: Fitter, messages: Sequence[Message], **variables: Any) -> str:
    """Return the prompt of a conversation, as the service makes it. Raises InvalidRequest naming the message."""
    fitted = fitter.fit(messages)
    try:
        return template.render([one.message for one in fitted], **variables)
    except InvalidRequest as error:
        raise name_message(error, fitted, partial(template.render, **variables)) from error


@cache
def made(name: str, *, with_tools: bool = False) -> tuple[ChatTemplate, Fitter]:
    """Return a template and what fits conversations to it."""
    with TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        (folder / "chat_template.jinja").write_text((TEMPLATES | ODD_TEMPLATES)[name])
        if (for_tools := TOOL_TEMPLATES.get(name)) is not None:
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
        template = ChatTemplate(folder)
    render = partial(template.render, tools=PROBE_TOOLS) if with_tools else template.render
    forms = find_forms(render, {"image": (place_of("image"), "<|image|>")})
    return template, Fitter(forms, {"image": "<|image|>"}, Hermes.form.text)
