# needs: pip litellm[proxy]>=1.100,<2
"""LiteLLM: its SDK, its proxy in front of the service, and its router, which turns to a model of a longer context."""

import json
import os
import secrets
import socket
import subprocess
import time
import urllib.request
from typing import Any

from checks import FOLDER, LONG, MODEL, PICTURE_URL, TOOL, URL, WEATHER, expect, failure, run

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

KEY = f"sk-{secrets.token_hex(16)}"
"""The proxy's: it starts with no weak one."""
SERVICE: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "sk-compat"}


def proxy() -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
    """Start the proxy; return it and the settings of requests to it. Raises RuntimeError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = FOLDER / "proxy.json"  # YAML, too
    models = [{"model_name": "behind", "litellm_params": SERVICE}]
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    command = ["litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health/liveliness", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return process, {"model": "litellm_proxy/behind", "api_base": url, "api_key": KEY}
    raise RuntimeError("the proxy ended")


PROCESS, PROXY = proxy()
WAYS = (SERVICE, PROXY)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(way: dict[str, Any], *messages: Any, **settings: Any) -> Any:
    return litellm.completion(**way, messages=list(messages), num_retries=0, **settings).choices[0].message


def text() -> None:
    for way in WAYS:
        expect(ask(way, user("Hi")).content, "Hello from Triptych.")


def image() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    for way in WAYS:
        expect(ask(way, user(parts)).content, "I see a picture.")


def stream() -> None:
    for way in WAYS:
        chunks = litellm.completion(**way, messages=[user("Hi")], num_retries=0, stream=True)
        expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "Hello from Triptych.")


def turns() -> None:
    for way in WAYS:
        expect(ask(way, user("Hi"), ask(way, user("Hi")), user("And now?")).content, "Hello again.")


def tool() -> None:
    for way in WAYS:
        called = ask(way, user(WEATHER), tools=[TOOL])
        (call,) = called.tool_calls
        expect(call.function.arguments, "Paris")
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        expect(ask(way, user(WEATHER), called, result, tools=[TOOL]).content, "The tool answered.")


def context() -> None:
    for way in WAYS:
        failure(litellm.ContextWindowExceededError, ask, way, user(LONG))
    longer = SERVICE | {"mock_response": "The longer one answers."}
    models = [{"model_name": name, "litellm_params": way} for name, way in (("short", SERVICE), ("longer", longer))]
    router = litellm.Router(models, context_window_fallbacks=[{"short": ["longer"]}], num_retries=0)
    expect(router.completion("short", [user("Hi")]).choices[0].message.content, "Hello from Triptych.")
    expect(router.completion("short", [user(LONG)]).choices[0].message.content, "The longer one answers.")


try:
    run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
finally:
    PROCESS.terminate()
    PROCESS.wait(30)
