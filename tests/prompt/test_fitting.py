"""Conversations of every shape with templates that behave as those of released models do."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from tests.support.conversations import CONVERSATIONS
from tests.support.templates import REFUSED, TEMPLATES
from triptych.errors import InvalidRequest
from triptych.prompt.fitting import Fitter, name_message
from triptych.prompt.template import ChatTemplate
from triptych.prompt.template_forms import find_forms

WORD = re.compile(r"(?:system|user|answer|result|weather|Rome|broken)\d")


def words(value: Any) -> list[str]:
    if isinstance(value, str):
        return WORD.findall(value)
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    return [word for member in members for word in words(member)]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[ChatTemplate, Fitter]:
        folder = tmp_path_factory.mktemp("template")
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        (folder / "chat_template.jinja").write_text(TEMPLATES[name])
        template = ChatTemplate(folder)
        return template, Fitter(find_forms(template.render, {}, takes_tools=template.supports_tools), {})

    return made


@pytest.mark.parametrize("shape", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost(fitted: Any, name: str, shape: str) -> None:
    """Every text is in the prompt, as itself, or an error names the message."""
    template, fitter = fitted(name)
    messages = CONVERSATIONS[shape]
    try:
        made = fitter.fit(messages)
        try:
            text = template.render([one.message for one in made])
        except InvalidRequest as error:
            raise name_message(error, made, template.render) from error
    except InvalidRequest as error:
        assert shape in REFUSED.get(name, ()), error
        assert re.match(r"messages\[\d\]", error.param or ""), error
        assert str(error).startswith(f"{error.param}: the model's chat template ")
        return
    assert shape not in REFUSED.get(name, ())
    missing = set(words(messages)) - set(words(text))
    assert not missing, text
    for printed in ("'type'", '"type"', "'city'", "None", "Undefined", '\\"city'):
        assert printed not in text
