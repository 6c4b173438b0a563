"""The playground's code, run as a reader would: it asks what the page asks, whatever texts and names of files have."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import is_ready, output, paste, viewing
from tests.support.image_cases import png
from tests.support.serving import Served, image

QUESTION = """\
"@@0@@" @@1@@ @@@2@@@, data_url("a.png", "image/png") dataUrl(name) $& $1 $$
'; $(touch attacked) `touch attacked` ${HOME} \\ \\n \\u0041 {name} %s %% # </script> \u2028 \U0001f642 " ' end"""
"""What looks like the code's own marks, and like code of the shell, Python and JavaScript."""
NAMES = ("@@@@1@@@@", "-n '\"$(touch attacked)`{}\\ %s.png", "@@@@0@@@@")
"""Names of files, of which some look like marks that the question leaves."""


def code(page: Page, language: str) -> str:
    page.get_by_role("tab", name=language).click()
    panel = page.get_by_role("tabpanel", name=language)
    expect(panel).to_be_visible()
    return str(panel.locator("pre").evaluate("element => element.textContent"))


def streamed(events: str) -> str:
    """The text of an answer from its events."""
    assert events.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_code_asks_what_the_page_asks(browser: Browser, service: Served, tmp_path: Path) -> None:
    # the first is of the size that cameras make, too long for an argument of a command
    large = np.random.default_rng(411).integers(0, 256, (300, 400, 3), np.uint8)
    pictures = dict(zip(NAMES, (png(Image.fromarray(large)), image(seed=412), image(seed=413)), strict=True))
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        page.get_by_label("Question").fill(QUESTION)
        page.locator("#max-tokens").fill("12")
        for name, content in pictures.items():
            (tmp_path / name).write_bytes(content)
            paste(page, content, name)
            expect(page.locator("#code-panel")).to_contain_text(name.replace("'", "'\\''"))
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer-state")).to_have_text("complete")
        answer = page.locator("#answer-text").evaluate("element => element.textContent")
        assert answer != ""
        [message] = json.loads(request.value.post_data or "")["messages"]
        assert message["content"][-1] == {"type": "text", "text": QUESTION}

        assert streamed(output(tmp_path, "bash", "-c", code(page, "curl"))) == answer
        assert output(tmp_path, sys.executable, "-c", code(page, "Python")) == answer
        script = code(page, "JavaScript")
        messages = script.partition("messages: ")[2].partition(",\n  max_tokens")[0]
        found = page.evaluate(f"() => {{ const dataUrl = (name, kind) => ({{ name, kind }}); return {messages}; }}")
        expected = [{"type": "image_url", "image_url": {"url": {"name": name, "kind": "image/png"}}} for name in NAMES]
        assert found == [message | {"content": [*expected, message["content"][-1]]}]
        assert not (tmp_path / "attacked").exists()


OPENAI = """\
export default class OpenAI {
  constructor({ baseURL, apiKey }) {
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${apiKey}` };
    const url = `${baseURL}/chat/completions`;
    const ask = (body) => fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
    this.chat = { completions: { create: async (body) => chunks(await ask(body)) } };
  }
}
async function* chunks(response) {
  if (!response.ok) throw new Error(await response.text());
  const lines = (await response.text()).split("\\n").filter((line) => line.startsWith("data: {"));
  for (const line of lines) yield JSON.parse(line.slice(6));
}
"""
"""What the code uses of the package ``openai``, which npm would have to fetch."""


def test_javascript_runs_as_a_whole(browser: Browser, service: Served, tmp_path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("no Node.js")
    package = tmp_path / "node_modules" / "openai"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"type": "module", "exports": "./index.js"}')
    (package / "index.js").write_text(OPENAI)
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        page.get_by_label("Question").fill(QUESTION)
        page.locator("#max-tokens").fill("12")
        for name, seed in zip(NAMES, (414, 415, 416), strict=True):
            (tmp_path / name).write_bytes(image(seed=seed))
            paste(page, image(seed=seed), name)
            expect(page.locator("#code-panel")).to_contain_text(name.replace("'", "'\\''"))
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer-state")).to_have_text("complete")
        answer = page.locator("#answer-text").evaluate("element => element.textContent")
        assert answer != ""
        (tmp_path / "ask.mjs").write_text(code(page, "JavaScript"))
        assert output(tmp_path, node, "ask.mjs") == answer
        assert not (tmp_path / "attacked").exists()
