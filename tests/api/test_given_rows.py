"""Embeddings in place of images: they answer as the images do, or are refused by name."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from tests.support.tiny import make_tiny
from triptych.api.given_rows import read_rows
from triptych.client import EncodeClient, EncodedItem, npy, vllm_part
from triptych.errors import MediaMismatch
from triptych.messages.rows import RowLayout

ROWS, GRID = "image_embeds.image_embeds", "image_embeds.image_grid_thw"


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Served]:
    with served(folder, "1E1PD", enable_mm_embeds=True) as service:
        yield service


@pytest.fixture
def taking(shared: Served) -> Iterator[Served]:
    """Takes embeddings; fails a test that leaves something behind."""
    yield shared
    shared.settle()
    wait_for(lambda: shared.running.frontend.router.given.idle)


def items(service: Served, *parts: dict[str, Any]) -> list[EncodedItem]:
    with EncodeClient(service.url) as client:
        return client.encode(*parts)


def part(item: EncodedItem, rows: Any = None, **fields: Any) -> dict[str, Any]:
    values = item.rows if rows is None else rows
    data = values if isinstance(values, bytes) else npy(values)
    embeds = {"image_embeds": base64.b64encode(data).decode(), "image_grid_thw": list(item.grid_thw)}
    return {"type": "image_embeds", "image_embeds": embeds | fields}


def test_rows_answer_as_their_images_do(taking: Served) -> None:
    pictures = [image_part(image(96, 64)), image_part(image(64, 128, 1))]
    expected = taking.text([text_part("a"), *pictures, text_part("b"), pictures[0]])
    first, second = map(vllm_part, items(taking, *pictures))
    assert taking.text([text_part("a"), first, second, text_part("b"), first]) == expected
    assert taking.text([text_part("a"), first, pictures[1], text_part("b"), pictures[0]]) == expected
    assert taking.text([text_part("a"), second, first, text_part("b"), first]) != expected


def test_other_rows_answer_otherwise(taking: Served) -> None:
    (item,) = items(taking, image_part())
    assert taking.text([part(item)]) != taking.text([part(item, -item.rows)])


def test_large_rows_are_cut_out_of_the_body(taking: Served) -> None:
    large = image_part(image(512, 512))
    (item,) = items(taking, large)
    assert item.rows.nbytes > 2**15
    assert taking.text([part(item)]) == taking.text([large])


def test_many_at_once_from_several_topologies(folder: Path) -> None:
    for topology in ("1EPD", "1E1P1D"):
        with served(folder, topology, enable_mm_embeds=True) as service, ThreadPoolExecutor(8) as threads:
            pictures = [image_part(image(seed=number)) for number in range(4)]
            expected = [service.text([one]) for one in pictures]
            parts = [part(one) for one in items(service, *pictures)]
            assert list(threads.map(service.text, [[one] for one in parts] * 4)) == expected * 4
            service.settle()


def test_a_client_that_hangs_up(taking: Served) -> None:
    (item,) = items(taking, image_part())
    taking.steps.delay = 0.05
    with taking.client() as client:
        body = taking.body([part(item)], stream=True, max_tokens=500)
        with client.stream("POST", CHAT, json=body) as response:
            next(response.iter_bytes())
    wait_for(lambda: not taking.running.frontend.router.num_requests)


def test_they_are_off_by_default(service: Served) -> None:
    (item,) = items(service, image_part())
    refused = service.post([part(item)])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"messages[0].content[0].{ROWS}")
    assert "--enable-mm-embeds" in refused.json()["error"]["message"]


def pickled() -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, np.array([{}]), allow_pickle=True)
    return file.getvalue()


HUGE = BytesIO()
np.lib.format.write_array_header_1_0(HUGE, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 2**20)})


def with_header(text: str) -> bytes:
    """A NumPy file with a header that isn't one."""
    return np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text.encode()


HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,)}" % 2**70,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (",
    "-" * 3000 + "1",
    "{'descr': [('a', ('<f4', (1, -1)))], 'fortran_order': False, 'shape': (1,)}",
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_headers_that_numpy_cant_read_are_refused(taking: Served, header: str) -> None:
    (item,) = items(taking, image_part())
    response = taking.post([part(item, with_header(header))])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"messages[0].content[0].{ROWS}"), error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda one: part(one, one.rows[:-1]), ROWS),
        (lambda one: part(one, one.rows[:, :-1]), ROWS),
        (lambda one: part(one, one.rows.ravel()), ROWS),
        (lambda one: part(one, one.rows.astype(np.float64)), ROWS),
        (lambda one: part(one, one.rows * np.float32(np.nan)), ROWS),
        (lambda one: part(one, npy(one.rows)[:-9]), ROWS),
        (lambda one: part(one, b"no array"), ROWS),
        (lambda one: part(one, pickled()), ROWS),
        (lambda one: part(one, HUGE.getvalue()), ROWS),
        (lambda one: part(one, image_embeds="??"), ROWS),
        (lambda one: part(one, image_grid_thw=[1, 2, 2]), ROWS),
        (lambda one: part(one, image_grid_thw=[1, 3, 5]), ROWS),
        (lambda one: part(one, image_grid_thw=[2, *one.grid_thw[1:]]), ROWS),
        (lambda one: part(one, image_grid_thw=[1, 2**16, 2**16]), ROWS),
        (lambda one: part(one, image_grid_thw=[1, 0, 4]), f"{GRID}[1]"),
        (lambda one: part(one, image_grid_thw=[1, 4]), GRID),
        (lambda one: part(one, image_grid_thw=[[1], 4, 4]), f"{GRID}[0]"),
    ],
)
def test_what_is_refused_by_name(taking: Served, change: Any, param: str) -> None:
    (item,) = items(taking, image_part())
    response = taking.post([text_part("a"), change(item)])
    error = response.json()["error"]
    assert (response.status_code in (400, 413), error["param"]) == (True, f"messages[0].content[1].{param}"), error


def test_they_are_not_encoded_again(taking: Served) -> None:
    (item,) = items(taking, image_part())
    with taking.client() as client:
        body = {"messages": [{"role": "user", "content": [part(item)]}]}
        assert client.post("/v1/encode", json=body).status_code == 400


def test_families_without_a_grid_take_none(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "llava", "llava")
    with served(folder, enable_mm_embeds=True) as service:
        (item,) = items(service, image_part())
        assert service.post([part(item)]).status_code == 400


def test_rows_become_those_of_the_layout() -> None:
    values = np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)
    bits = read_rows(npy(values), RowLayout("m", "bfloat16", 8, 16))
    assert np.abs((bits.astype(np.uint32) << 16).view(np.float32) - values).max() <= np.abs(values).max() / 256
    assert np.array_equal(read_rows(npy(values), RowLayout("m", "float16", 8, 16)), values.astype(np.float16))
    with pytest.raises(MediaMismatch, match="finite"):
        read_rows(npy(values * np.float32(1e6)), RowLayout("m", "float16", 8, 16))
