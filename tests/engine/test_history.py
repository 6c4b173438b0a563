from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from triptych.engine.history import History


@given(
    prompt=st.lists(st.integers(0, 300), max_size=200),
    steps=st.lists(st.lists(st.integers(0, 300), max_size=80), max_size=4),
)
def test_counts_include_appended_tokens(prompt: list[int], steps: list[list[int]]) -> None:
    history = History(list(prompt), len(prompt))
    generated: list[int] = []
    for step in steps:
        history.tokens.extend(step)
        generated += step
        for counts, tokens in ((history.seen, prompt + generated), (history.generated, generated)):
            found, numbers = counts.update()
            assert dict(zip(found.tolist(), numbers.tolist(), strict=True)) == Counter(tokens)
    assert history.num_generated == len(generated)


def test_counting_is_incremental() -> None:
    history = History([*range(100)] * 10, 1000)
    history.seen.update()
    history.tokens[:1000] = [0] * 1000  # never happens; shows what is counted again
    history.tokens.append(5)
    found, numbers = history.seen.update()
    assert len(found) == 100
    assert numbers.sum() == 1001
