"""``triptych profile``, from the command to the file and its drawings."""

from pathlib import Path

import pytest

from tests.support.exits import exit_code
from tests.support.profiles import example_profile
from triptych.cli import main
from triptych.costs import profile as profiles
from triptych.costs.profile import batch_values, step_values
from triptych.demo import MODEL_DIR
from triptych.measure.profile.plan import FULL, QUICK, ProfilePlan
from triptych.measure.profile.plot import draw
from triptych.models.registry import identity_of


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "demo", "--out", str(tmp_path / "none" / "p.json")])
    assert "can't be written: no folder to write it to" in capsys.readouterr().err


@pytest.mark.parametrize("plan", [FULL, QUICK])
@pytest.mark.parametrize(("max_tokens", "max_sequences"), [(512, 32), (64, 4), (16, 32)])
def test_steps_keep_within_limits(plan: ProfilePlan, max_tokens: int, max_sequences: int) -> None:
    steps = list(plan.steps(max_tokens, max_sequences))
    values = [step_values(step.chunks) for step in steps]
    assert max(one["rows"] for one in values) <= max_tokens
    assert max(one["sequences"] for one in values) <= max_sequences
    kinds = {(one["tokens"] > 0, one["sequences"] > 0) for one in values}
    assert kinds == {(True, False), (False, True), (True, True)}


def test_each_cost_is_drawn(tmp_path: Path) -> None:
    profile = example_profile()
    drawn = draw(profile, tmp_path / "new")
    names = {name for name, cost in profile.costs() if len(cost.points) > 1}
    assert len(drawn) == len(names) + 1
    assert all(path.read_text().rstrip().endswith("</svg>") for path in drawn)


@pytest.mark.slow
def test_a_profile_of_the_bundled_model(tmp_path: Path) -> None:
    out, folder = tmp_path / "profile.json", tmp_path / "plots"
    assert exit_code(["profile", "demo", "--quick", "--out", str(out), "--plot", str(folder)]) == 0
    profile = profiles.read(out)
    assert profile.model.identity == identity_of(MODEL_DIR)
    assert {one.threads for one in profile.steps} >= {1}
    assert profile.steps_at(1).seconds(step_values([(128, 0)])) > profile.steps_at(1).seconds(step_values([(1, 64)]))
    assert profile.encode_at(1).seconds(batch_values([100])) > 0
    assert "shm" in profile.transfers and profile.transfers["shm"].keys() == {"kv", "embeddings"}
    assert {one.cores for one in profile.interference} >= {"shared"}
    assert all(item.rows <= item.tokens < item.patches for item in profile.items)
    assert (folder / "interference.svg").exists()
