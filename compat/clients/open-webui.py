# needs: own torch
# needs: pip open-webui>=0.12,<1
"""Open WebUI's own server with the service as its connection: the first user signs up and chats through its API.

When the context is full it passes the service's error on, which names the context's length.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MODEL, CONTEXT, FOLDER = os.environ["COMPAT_MODEL"], os.environ["COMPAT_CONTEXT"], Path(os.environ["COMPAT_FOLDER"])
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SETTINGS = {
    "OPENAI_API_BASE_URL": os.environ["OPENAI_BASE_URL"],
    "DATA_DIR": str(FOLDER / "data"),
    "WEBUI_SECRET_KEY": "compat",
    "ENABLE_OLLAMA_API": "false",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
}


def call(url: str, body: dict[str, Any] | None = None, key: str = "") -> str:
    """The body of the answer, also of an error's."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def checks(url: str, key: str) -> None:
    """Ask through the server's API, and print how each check ended."""

    def ask(*messages: dict[str, Any], **more: Any) -> str:
        return call(f"{url}/api/chat/completions", {"model": MODEL, "messages": messages} | more, key)

    def report(name: str, answer: str, *expected: str) -> None:
        missing = [text for text in expected if text not in answer]
        print(f"{name}: failed {' '.join(answer.split())[-300:]}" if missing else f"{name}: ok", flush=True)

    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    picture = base64.b64encode(Path(os.environ["COMPAT_IMAGE"]).read_bytes()).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    report("text", ask(user("Hi")), "Hello from Triptych.")
    report("image", ask(user([{"type": "text", "text": "What is it?"}, shown])), "I see a picture.")
    report("stream", ask(user("Hi"), stream=True), "data: ", '"Hello"', '" from Triptych."', "[DONE]")
    earlier = {"role": "assistant", "content": "Hello from Triptych."}
    report("turns", ask(user("Hi"), earlier, user("And now?")), "Hello again.")
    asked = user("What is the weather?")
    called = ask(asked, tools=[TOOL])
    try:
        message = json.loads(called)["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        report("tool", ask(asked, message, result, tools=[TOOL]), "The tool answered.")
    except (KeyError, ValueError):
        report("tool", called, "get_weather")
    long = Path(os.environ["COMPAT_LONG"]).read_text()
    report("context", ask(user(long)), f"maximum context length is {CONTEXT} tokens")


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (FOLDER / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=log, stderr=log)
    try:
        for _ in range(200):
            try:
                call(f"{url}/health")
                break
            except OSError:
                time.sleep(1)
        account = {"name": "Compat", "email": "compat@example.org", "password": "compat-compat"}
        token = json.loads(call(f"{url}/api/v1/auths/signup", account))["token"]
        call(f"{url}/api/models", key=token)
        checks(url, token)
    except (OSError, ValueError, KeyError) as error:
        print(error, (FOLDER / "log").read_text(errors="replace")[-3000:])
    finally:
        server.terminate()
        server.wait(30)


main()
