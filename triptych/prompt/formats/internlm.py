"""Calls as InternLM 2 and 2.5, and InternVL's models on them, write them::

<|action_start|><|plugin|>
{"name": "weather", "parameters": {"city": "Rome"}}<|action_end|>
"""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import read_calls
from triptych.prompt.formats.reader import Reader, Steps

ACTION, PLUGIN, END_ACTION = "<|action_start|>", "<|plugin|>", "<|action_end|>"


class InternLm(Format):
    families = "InternLM 2 and 2.5, and InternVL on them"
    parsers = ("internlm",)
    openers = (ACTION,)
    closers = (PLUGIN, END_ACTION)
    form = CallForm(ACTION, f'{PLUGIN}\n{{"name": "{{name}}", "parameters": {{arguments}}}}{END_ACTION}', f"\n{ACTION}")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from reader.expect(PLUGIN)
        yield from read_calls(reader, out)
        yield from reader.expect(END_ACTION)
