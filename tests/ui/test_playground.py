"""The playground in a real browser: every way to attach media, and the answer. The model sees and hears."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, Request, Route, expect

from tests.support.browser import PHONE, drop, is_ready, paste, viewing
from tests.support.clips import clip
from tests.support.serving import Served, image
from tests.support.sounds import sound, tone

HOSTILE_NAME = "<img src=x onerror=alert(2)> '\"$(id)`.png"


def attached(page: Page) -> Locator:
    return page.get_by_role("list", name="Attached media").get_by_role("listitem")


def send(page: Page, question: str, num_tokens: int = 8) -> None:
    page.get_by_label("Question").fill(question)
    page.locator("#max-tokens").fill(str(num_tokens))
    page.get_by_role("button", name="Send").click()


def is_answered(page: Page) -> Locator:
    """The waterfall of the answer, which is complete."""
    expect(page.locator("#answer-state")).to_have_text("complete")
    expect(page.locator("#answer-text")).not_to_be_empty()
    return page.locator("#answer-waterfall")


def test_a_picture_that_is_pasted_is_planned_answered_and_drawn(browser: Browser, service: Served) -> None:
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        paste(page, image(96, 64, seed=401), HOSTILE_NAME)
        for fact in (HOSTILE_NAME, "96 × 64", "tokens", "cost"):
            expect(attached(page)).to_contain_text(fact)
        page.get_by_label("Question").fill("What is this?")
        expect(page.locator("#plan")).to_contain_text("of them media")
        send(page, "What is this?")
        waterfall = is_answered(page)
        expect(waterfall.locator(".track[data-stage=encode] i")).to_have_count(1)
        expect(waterfall.get_by_role("list", name="Which instance did what")).to_contain_text("e0")
        expect(waterfall).to_contain_text("pd1 received rows of item 1")
        waterfall.get_by_role("link", name="See it among the requests").click()
        expect(page.locator("#detail-body")).to_contain_text("/v1/chat/completions")
        expect(page.locator("#detail-body .track[data-stage=decode] i")).to_have_count(1)
        assert page.locator("img[src=x]").count() == 0


def test_a_conversation_about_the_sample_picture_goes_on(browser: Browser, service: Served) -> None:
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        page.get_by_role("button", name="Use a sample picture").click()
        expect(attached(page)).to_contain_text("224 × 224")
        page.get_by_role("button", name="Send").click()  # asks what the empty field suggests
        is_answered(page)
        first = page.locator("#answer-text").inner_text()
        expect(page.locator("#code-panel pre")).to_contain_text('"text": "What is in this picture?"')
        page.get_by_text("System prompt").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Question").fill("And what else?")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.get_by_role("button", name="Send").click()
        messages = json.loads(asked.value.post_data or "")["messages"]
        assert [one["role"] for one in messages] == ["system", "user", "assistant", "user"]
        assert (messages[2]["content"], messages[3]["content"]) == (first, "And what else?")
        is_answered(page)
        expect(page.locator("#turns li")).to_have_count(1)
        expect(page.locator("#turns")).to_contain_text("What is in this picture?")
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator("#turns li")).to_have_count(0)


def test_camera_drag_and_file_chooser_bring_pictures_video_and_audio(
    browser: Browser, service: Served, tmp_path: Path
) -> None:
    """The camera is Chromium's own, which films a green face. Files are dropped beside the dashed frame, too."""
    film, song = tmp_path / "film.mp4", tmp_path / "song.wav"
    film.write_bytes(clip(frames=20, seed=402))
    song.write_bytes(sound("wav", tone(1.3, 16_000)))
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        camera = page.get_by_role("button", name="Use the camera")
        camera.click()
        assert viewer.faults() == []
        page.get_by_role("button", name="Take it").click()  # as soon as it can be clicked
        expect(attached(page).nth(0)).to_contain_text(re.compile(r"camera\.jpg.*640 × 480.* tokens · cost \d"))
        expect(camera).to_be_focused()
        drop(page, ".top", film)
        expect(attached(page).nth(1)).to_contain_text(
            re.compile(r"film\.mp4.*2\.0 s, 96 × 64.* 4 frames, 2 steps in time .* tokens · cost \d")
        )
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Choose files").click()
        chooser.value.set_files(song)
        expect(attached(page).nth(2)).to_contain_text(re.compile(r"song\.wav.*1\.3 s · 2 parts .* tokens · cost \d"))
        expect(page.locator("#plan")).to_contain_text("of them media")
        planned = [int(found) for found in re.findall(r"· (\d+) tokens", page.locator("#items").inner_text())]

        service.encoder.close()
        send(page, "What is this?")
        waterfall = page.locator("#answer-waterfall")
        expect(waterfall.locator("tr.running")).to_contain_text("encode")
        expect(page.locator("#answer-state")).to_have_text("waiting for the first token")
        service.encoder.opened.set()
        is_answered(page)
        for item in (1, 2, 3):
            expect(waterfall.locator("tr").filter(has_text=re.compile(rf"^encode {item}\s*e0"))).to_have_count(1)
        who = waterfall.get_by_role("list", name="Which instance did what")
        expect(who).to_contain_text(re.compile(r"e0 .*encoded item 1, 2, 3 in"))
        expect(who).to_contain_text(re.compile(r"pd1 .*received rows of item 1, 2, 3 in .*decoded in"))
        prompt = page.locator(".answer-figures div").filter(has_text="Prompt").locator("dd").inner_text()
        assert f"The prompt will have {prompt}, {sum(planned)} of them media." == page.locator("#plan").inner_text()

        assert viewer.faults() == []
        page.emulate_media(color_scheme="dark")
        assert viewer.faults("color-contrast") == []
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        assert viewer.faults() == []
        page.get_by_role("button", name="Remove film.mp4").click()
        expect(attached(page)).to_have_count(2)
        expect(page.locator("#code-panel")).not_to_contain_text("film.mp4")


def has_media(request: Request) -> list[bool]:
    """Whether each media item of a request is in it, and not only named."""
    message, *_ = json.loads(request.post_data or "")["messages"]
    return [part[part["type"]] is not None for part in message["content"] if part["type"] != "text"]


@contextmanager
def uploads(page: Page) -> Iterator[list[list[bool]]]:
    """What ``has_media`` says of each plan and of each chat completion that the page asks for."""
    sent = list[list[bool]]()

    def note(request: Request) -> None:
        if request.url.endswith(("/v1/plan", "/v1/chat/completions")):
            sent.append(has_media(request))

    page.on("request", note)
    yield sent
    page.remove_listener("request", note)


def planned(page: Page, change: Callable[[], object]) -> int:
    """Tokens of the prompt, as planned after a change."""
    with page.expect_response(lambda one: one.url.endswith("/v1/plan") and one.ok) as answer:
        change()
    return int(answer.value.json()["prompt_tokens"])


def test_media_are_sent_once(browser: Browser, service: Served) -> None:
    with viewing(browser, service.url) as viewer, uploads(viewer.page) as sent:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        question = page.get_by_label("Question")
        planned(page, lambda: paste(page, image(96, 64, seed=417), "first.png"))
        planned(page, lambda: question.fill("What is this?"))
        planned(page, lambda: paste(page, image(96, 64, seed=418), "second.png"))
        num_tokens = planned(page, lambda: question.fill("And this?"))
        assert sent == [[True], [False], [False, True], [False, False]]
        page.get_by_role("button", name="Send").click()
        expect(is_answered(page).locator(".answer-figures")).to_contain_text(f"Prompt{num_tokens} tokens")
        assert sent[4:] == [[False, False]]


def forget(page: Page, path: str, times: int) -> None:
    """Have the service not know the first ``times`` names of each request: it gets others, new ones each time."""
    number = count()

    def rename(route: Route, request: Request) -> None:
        route.continue_(post_data=(request.post_data or "").replace("ui-", f"gone{next(number)}-", times))

    page.route(path, rename)


def test_media_that_the_service_has_dropped_are_sent_again(browser: Browser, service: Served) -> None:
    with (
        viewing(browser, service.url, expected=("status of 400",)) as viewer,
        uploads(viewer.page) as sent,
    ):
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        question = page.get_by_label("Question")
        planned(page, lambda: paste(page, image(96, 64, seed=419), "first.png"))
        num_tokens = planned(page, lambda: paste(page, image(96, 64, seed=420), "second.png"))
        for times, wanted in (
            (2, [[False, False], [True, False], [True, True]]),  # both are gone
            (0, [[False, False]]),
            (1, [[False, False], [True, False]]),
            (1, [[False, False], [True, False]]),
            (1, [[True, False]]),  # the service doesn't seem to keep the first
        ):
            sent.clear()
            forget(page, "**/v1/plan", times)
            longer = question.input_value() + " and what is in this other picture?"
            assert planned(page, partial(question.fill, longer)) > num_tokens
            assert sent == wanted
            page.unroute("**/v1/plan")
        sent.clear()
        forget(page, "**/v1/chat/completions", 2)
        page.get_by_role("button", name="Send").click()
        is_answered(page)
        assert sent == [[True, False], [True, True]]


def test_an_answer_waits_for_the_upload_that_is_under_way(browser: Browser, service: Served) -> None:
    held = list[Route]()
    with viewing(browser, service.url) as viewer, uploads(viewer.page) as sent:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/v1/plan", hold)
        with page.expect_request("**/v1/plan"):
            paste(page, image(96, 64, seed=421), "large.png")
        for button, state in (("Send", "waiting for the first token"), ("Stop", "stopped"), ("Send", "waiting")):
            page.get_by_role("button", name=button).click()
            expect(page.locator("#answer-state")).to_contain_text(state)
        assert sent == [[True]]
        held.pop().continue_()
        is_answered(page)
        assert sent == [[True], [False]]


def test_an_error_in_the_middle_of_an_answer_is_shown(browser: Browser, service: Served) -> None:
    """Its stream ends without ``[DONE]``."""
    chunks = [{"choices": [{"delta": {"content": "One two"}}]}, {"error": {"message": "the model failed"}}]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
        send(page, "Hello")
        expect(page.locator("#answer-error")).to_have_text("the model failed")
        expect(page.locator("#answer-text")).to_have_text("One two")
        expect(page.locator("#answer-state")).to_have_text("failed")


def test_it_says_that_the_service_is_silent(browser: Browser, service: Served) -> None:
    """Time in the page passes faster."""
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        page.clock.install()
        viewer.open("playground")
        is_ready(page)
        page.route("**/v1/plan", lambda _: None)
        with page.expect_request("**/v1/plan"):
            page.get_by_label("Question").fill("Hello")
        page.clock.fast_forward(31_000)
        expect(page.locator("#plan")).to_have_text("the service has sent nothing for 30 s")

        service.steps.close()
        send(page, "Hello")
        waterfall = page.locator("#answer-waterfall")
        expect(waterfall.locator("tr.running").first).to_be_visible()
        for _ in range(3):  # it is at work on the request
            page.clock.fast_forward(25_000)
            with page.expect_response("**/ui/requests/*"):
                pass
        expect(page.locator("#answer-error")).to_be_hidden()
        page.route("**/ui/requests/*", lambda _: None)
        with page.expect_request("**/ui/requests/*"):
            pass
        page.clock.fast_forward(61_000)
        expect(page.locator("#answer-error")).to_have_text("the service has sent nothing for 60 s")
        expect(page.locator("#answer-state")).to_have_text("failed")
        service.steps.opened.set()


def test_files_that_are_no_media_are_named_and_text_can_be_dragged(
    browser: Browser, service: Served, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("no picture")
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        drop(page, "#drop", notes)
        error = page.locator("#files-error")
        expect(error).to_have_text("notes.txt is neither a picture, a video nor audio.")
        with page.expect_response("**/v1/plan"):
            page.get_by_label("Question").fill("Hello")
        expect(page.locator("#plan")).to_contain_text("The prompt will have")
        expect(error).to_be_visible()
        assert viewer.faults() == []
        paste(page, image(96, 64, seed=403), "first.png")
        expect(error).to_be_hidden()
        drop(page, "#question", text=" and goodbye")
        expect(page.get_by_label("Question")).to_have_value(re.compile("goodbye"))
        expect(attached(page)).to_have_count(1)


def test_an_answer_streams_in_and_is_stopped(browser: Browser, service: Served) -> None:
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("playground")
        is_ready(page)
        service.steps.delay = 0.1
        send(page, "Hello", num_tokens=500)
        expect(page.locator("#answer-text")).not_to_be_empty()
        expect(page.locator("#answer-state")).to_have_text("answering")
        expect(page.locator("#answer-waterfall tr.running")).to_contain_text("decode")
        expect(page.get_by_role("button", name="Send")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#answer-state")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_focused()
        expect(page.locator("#answer-text")).not_to_be_empty()
        service.steps.reset()
        send(page, "Hello")
        is_answered(page)
