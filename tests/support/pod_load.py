"""Clients of a service whose frontends are pods."""

import threading
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.support.pods import Pods
from tests.support.serving import image, image_part, text_part


@dataclass
class Load:
    """Clients that ask one after the other, of any frontend that a Service would send them to. Each keeps its
    connections, as clients of a Service do, and opens one only when its last was closed."""

    service: Pods
    key: str = ""
    """The API key of the clients, if they have one."""
    answers: Counter[tuple[int, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._threads = [threading.Thread(target=self._ask, args=[number], daemon=True) for number in range(4)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, number: int) -> None:
        self.service.client.enter()
        content = [image_part(image(96, 96, number)), text_part("What is in the picture?")]
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0,
            "seed": number,
        }
        while not self._ending.is_set():
            if not (urls := self.service.endpoints()):
                self.problems.append("no frontend receives connections")
                return
            url = urls[(number + sum(self.answers.values())) % len(urls)]
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client:
                self._ask_there(client, number, body)

    def _ask_there(self, client: httpx.Client, number: int, body: dict[str, object]) -> None:
        """Ask until the frontend closes the connection, at most 20 times."""
        for _ in range(20):
            try:
                reply = client.post("/v1/chat/completions", json=body)
            except httpx.HTTPError as error:
                self.problems.append(f"{client.base_url}: {error!r}")
                return
            if reply.status_code == 200:
                self.answers[number, reply.json()["choices"][0]["message"]["content"]] += 1
            else:
                self.problems.append(f"{client.base_url}: {reply.status_code} {reply.text}")
            if reply.headers.get("connection") == "close" or self._ending.is_set():
                return

    def check(self) -> None:
        assert self.problems == []
        assert sum(self.answers.values()) > 20
        assert len({number for number, _ in self.answers}) == len(self.answers), "the same question, another answer"
