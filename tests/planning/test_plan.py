"""Plans: the rates that topologies keep, and what is said of them. Costs are those of an example profile."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.profiles import example_profile, point
from triptych.cli import make_parser
from triptych.costs import profile as profiles
from triptych.costs.fitting import fitted, linear
from triptych.errors import ConfigError
from triptych.planning.candidates import Budget, Candidate, candidates, neighbors
from triptych.planning.report import Price, advice
from triptych.planning.search import KeptRate, SearchResult, capacity, search
from triptych.planning.trial import Length, Slo, Trial, Trials
from triptych.topology import Topology
from triptych.workload.mix import ArrivalPattern, RequestKind, RequestMix
from triptych.workload.trace import TraceRequest, write_trace

PICTURES = RequestMix(kinds=(RequestKind(images=1, text=20, answer=8),))
SLO = Slo(ttft=2.0, tpot=0.1, share=0.95)


def of_pictures(rate: float) -> Iterable[TraceRequest]:
    return PICTURES.requests(rate, 40, seed=0)


def candidate(topology: str, cores: int = 2) -> Candidate:
    parsed = Topology.parse(topology)
    return Candidate(parsed, max(1, cores // len(parsed.roles)), cores)


def test_a_trial_says_how_a_rate_is_kept() -> None:
    trials = Trials(example_profile(), of_pictures, SLO)
    easy = trials.run(candidate("1E1PD"), 1.0)
    assert easy.kept == 1.0
    assert easy.keeps(SLO.share)
    # alone: an item is preprocessed and encoded, its prompt prefilled
    assert 0.05 < easy.ttft[0] < 0.3
    assert trials.run(candidate("1E1PD"), 1.0) == easy
    hard = trials.run(candidate("1E1PD"), 50.0, whole=True)
    assert not hard.keeps(SLO.share)
    assert hard.growth > 0.05 or hard.kept < SLO.share
    assert max(hard.busy.values()) > 0.8
    assert "binds" in hard.binds.sentence


def test_a_trial_goes_on_until_the_service_is_full() -> None:
    """Thirty requests alone are no load: their answers take longer than they take to come."""
    answers = RequestMix(kinds=(RequestKind(text=20, answer=300),))
    slo = Slo(ttft=2.0, tpot=0.02, share=0.95)

    def trial(length: Length | None, number: int, rate: float) -> Trial:
        requests = Trials(example_profile(), lambda rate: answers.requests(rate, number, 0), slo, length=length)
        return requests.run(candidate("1EPD"), rate)

    assert trial(None, 30, 12.0).keeps(slo.share)
    assert not trial(Length(30), 1000, 12.0).keeps(slo.share)
    kept = trial(Length(30), 1000, 4.0)
    assert kept.keeps(slo.share)
    assert kept.tokens_per_second == pytest.approx(4.0 * 300), "none of the drain's time counts"


def test_a_trial_ends_once_it_is_clear() -> None:
    """Whether objectives are kept, or not, shows long before all requests have come."""
    drawn: list[float] = []

    def counted(rate: float) -> Iterable[TraceRequest]:
        for one in PICTURES.requests(rate, 1000, seed=0):
            drawn.append(one.at)
            yield one

    trials = Trials(example_profile(), counted, SLO, length=Length(200))
    assert trials.run(candidate("2EPD"), 1.0).keeps(SLO.share)
    assert len(drawn) < 80
    assert not trials.run(candidate("2EPD"), 50.0).keeps(SLO.share)
    assert len(drawn) < 280
    drawn.clear()
    trials.run(candidate("2EPD"), 1.0, whole=True)
    assert len(drawn) > 200
    drawn.clear()
    trials.short().run(candidate("2EPD"), 4.0)
    assert len(drawn) < 60


def test_an_idle_service_keeps_a_rate_however_low() -> None:
    assert Trials(example_profile(), of_pictures, SLO, length=Length(20)).run(candidate("1EPD"), 0.005).kept == 1.0


def test_a_trial_has_whole_periods_of_bursts() -> None:
    arrivals = ArrivalPattern("bursts", period=20.0, share=0.1, peak=5.0)
    bursts = RequestMix(kinds=(RequestKind(text=20, answer=2),), arrivals=arrivals)
    trials = Trials(example_profile(), lambda rate: bursts.requests(rate, 1000, 0), SLO, length=Length(20, 20.0))
    kept = trials.run(candidate("1EPD"), 5.0)
    assert (kept.rate, kept.tokens_per_second) == pytest.approx((5.0, 10.0))


def test_a_capacity_is_between_what_is_kept_and_what_is_not() -> None:
    found = capacity(Trials(example_profile(), of_pictures, SLO), candidate("1E1PD"), guess=5.0)
    assert found.at is not None
    assert found.above is not None
    assert found.at.keeps(SLO.share)
    assert not found.above.keeps(SLO.share)
    assert 1.0 < found.above.rate / found.at.rate < 1.1


def test_the_search_for_a_rate_ends_where_requests_no_longer_meet() -> None:
    """No rate is low enough for an objective that a request alone fails."""
    found = capacity(Trials(example_profile(), of_pictures, Slo(ttft=0.01, tpot=0.1)), candidate("1EPD"))
    assert found.rate == 0.0
    assert len(found.trials) < 6


def test_all_that_fit_are_candidates() -> None:
    def named(budget: Budget, *, takes_media: bool = True) -> list[str]:
        return [str(one) for one in candidates(budget, takes_media=takes_media)]

    assert named(Budget(cores=2)) == [
        "1EPD",
        "2EPD",
        "3EPD",
        "1E1PD",
        "1EP1D",
        "1E2PD",
        "1EP2D",
        "1E1P1D",
        "2E1PD",
        "2EP1D",
    ]
    assert named(Budget(cores=2), takes_media=False) == ["1PD", "2PD", "1P1D"]
    of_eight = candidates(Budget(instances=8), takes_media=True)
    assert {len(one.topology.roles) for one in of_eight} == {8}
    assert {one.threads for one in candidates(Budget(cores=8), takes_media=True) if len(one.topology.roles) == 2} == {4}
    assert len(candidates(Budget(instances=64), takes_media=True)) <= 64


@pytest.mark.parametrize("cores", [7, 16, 63, 64, 128, 4096])
def test_small_topologies_of_each_kind_are_candidates_on_any_machine(cores: int) -> None:
    found = {str(one) for one in candidates(Budget(cores=cores), takes_media=True)}
    small = {str(one) for one in candidates(Budget(cores=4), takes_media=True)}
    assert small <= found
    assert {"1E1PD", "1E2PD", "1EP1D", "1E1P1D", "2E1P1D"} <= small
    assert len(found) <= 64
    larger = [one.topology for one in candidates(Budget(cores=cores), takes_media=True) if len(one.topology.roles) > 4]
    assert {len(one.groups) for one in larger} == {1, 2, 3}
    assert max(len(one.roles) for one in larger) == min(cores, 64)


def test_neighbors_fit_as_well() -> None:
    near = {str(one): one for one in neighbors(candidate("4E8PD", 16), Budget(cores=16), takes_media=True)}
    assert {"5E7PD", "3E9PD", "7E5PD", "4E9PD", "4E11PD", "3E8PD", "1E5PD"} <= near.keys()
    assert near["4E11PD"].threads == 1
    assert all(len(one.topology.roles) <= 16 for one in near.values())
    of_four = neighbors(candidate("1E3PD"), Budget(instances=4, threads=8), takes_media=True)
    assert [str(one) for one in of_four] == ["2E2PD"]


def test_one_request_of_a_short_trial_may_be_late() -> None:
    """The sixth request takes longer than the objective even alone; so does the twelfth, where there is one."""
    slo = Slo(ttft=0.05, tpot=0.1, share=0.99)

    def trials(*slow: int) -> Trials:
        def requests(rate: float) -> Iterable[TraceRequest]:
            return (TraceRequest(number / rate, 3000 if number in slow else 20, 8) for number in range(2000))

        return Trials(example_profile(), requests, slo, length=Length(80))

    one = candidate("1EPD")
    assert trials().kept(trials().run(one, 0.5))
    assert trials(5).run(one, 0.5, whole=True).failed == 1
    assert trials(5).short().kept(trials(5).short().run(one, 0.5))
    assert capacity(trials(5).short(), one).rate > 0
    assert not trials(5, 11).short().kept(trials(5, 11).short().run(one, 0.5))


class Rated(Trials):
    """Trials that topologies keep up to given rates: other ones by short trials."""

    def __init__(self, rates: dict[str, tuple[float, float]], *, is_short: bool = False) -> None:
        super().__init__(example_profile(), of_pictures, SLO)
        self.rates = rates
        self.is_short = is_short

    def short(self) -> Trials:
        return Rated(self.rates, is_short=True)

    def run(self, candidate: Candidate, rate: float, *, whole: bool = False) -> Trial:
        kept = rate <= self.rates[str(candidate.topology)][not self.is_short]
        at = made("1EPD", rate).at
        assert at is not None
        return replace(at, kept=float(kept), lost=not kept, failed=100 * (not kept), in_flight=1.0, busy={"epd0": 0.5})


@pytest.mark.parametrize("short", [(10.4, 10.3, 10.2, 10.1, 10.0), (0.0,) * 5], ids=["too much", "nothing"])
def test_whole_trials_say_what_the_best_keeps(short: tuple[float, ...]) -> None:
    """Short ones may say too much of all candidates, or that none keeps any rate."""
    names = ("1E1PD", "1E2PD", "1EP1D", "1EP2D", "1E1P1D")
    rates = {name: (rate, 9.0) for name, rate in zip(names, short, strict=True)}
    found = search(Rated(rates), [candidate(name) for name in names], example_profile())
    assert 8.0 < found.best.rate <= 9.0
    assert found.best_split is found.best


def test_a_search_goes_on_near_the_best() -> None:
    """Pictures need more encoders than the only split candidate has."""
    budget = Budget(cores=3)

    def near(one: Candidate) -> Iterable[Candidate]:
        return neighbors(one, budget, takes_media=True)

    trials = Trials(example_profile(), lambda rate: PICTURES.requests(rate, 16, seed=0), SLO)
    found = search(trials, [candidate("1E1PD", 3)], example_profile(), near=near)
    assert str(found.best.candidate).startswith("2E1PD")
    assert found.best.above is not None
    assert found.best.above.rate / found.best.rate < 1.02, "as near as needed to tell it from others"
    assert found.best.rate > 1.2 * next(one.rate for one in found.capacities if str(one.candidate) == "1E1PD")


def made(topology: str, rate: float) -> KeptRate:
    at = Trial(rate, 1.0, False, (0.1, 0.2), (0.01, 0.02), 100.0, 10.0, {}, None, 0.0)  # type: ignore[arg-type]
    return KeptRate(candidate(topology), rate, at, None)


@pytest.mark.parametrize(
    ("found", "said", "chosen"),
    [
        (
            [made("1E1PD", 12.0), made("2EPD", 10.0), made("1EPD", 4.0)],
            "Split: 1E1PD keeps 12 requests/s, 1.20 ×",
            "1E1PD",
        ),
        ([made("1E1PD", 10.2), made("2EPD", 10.0)], "Don't split: 2EPD keeps 10 requests/s", "2EPD"),
        ([made("2EPD", 10.0), made("1E1PD", 8.0)], "Don't split: 2EPD", "2EPD"),
        ([made("1E1PD", 8.0), made("2EPD", 0.0)], "Split: 1E1PD keeps 8 requests/s, and no unsplit", "1E1PD"),
        ([made("2EPD", 8.0), made("1E1PD", 0.0)], "Don't split: 2EPD keeps 8 requests/s, and no split", "2EPD"),
    ],
)
def test_splitting_is_advised_only_where_it_is_worth_it(found: list[KeptRate], said: str, chosen: str) -> None:
    """Against the best unsplit topology, whatever its number of instances."""
    result = SearchResult(found)
    assert advice(result).startswith(said)
    assert str(result.chosen.candidate) == chosen


def test_the_command_has_what_was_profiled() -> None:
    settings = {"quantization": "int8", "max_num_seqs": 256, "max_num_batched_tokens": 512, "kv_cache_tokens": 9000}
    profile = msgspec.structs.replace(example_profile(), settings={**settings, "encode_latency_ms": 100})
    one = replace(candidate("1E1PD"), changes={"max_num_batched_tokens": 128})
    assert one.command("m", profile) == (
        "triptych serve m --topology 1E1PD --threads 1 --quantization int8 --max-num-seqs 256 "
        "--encode-latency-ms 100 --max-num-batched-tokens 128"
    )
    words = shlex.split(one.command("m", profile))
    make_parser(["serve"]).parse_args(words[1:])


def test_instances_with_machines_of_their_own_join_a_frontend() -> None:
    (one,) = (
        one for one in candidates(Budget(instances=2, threads=16), takes_media=True) if str(one.topology) == "1E1PD"
    )
    frontend, *instances = one.command("m", example_profile()).splitlines()
    assert "--role frontend" in frontend
    assert [line.partition("--role ")[2].split()[:3] for line in instances] == [
        ["E", "--name", "e0"],
        ["PD", "--name", "pd0"],
    ]
    for line in (frontend, *instances):
        make_parser(["serve"]).parse_args(shlex.split(line)[1:])
    assert all("--join FRONTEND:8001" in line and "--threads 16" in line for line in instances)


def test_rows_between_machines_take_as_long_as_over_a_network() -> None:
    profile = example_profile()
    slow = fitted([point(1.0 + size / 1e6, bytes=size) for size in (2**16, 2**20, 2**24)], linear("bytes"))
    profile = msgspec.structs.replace(
        profile, transfers={**profile.transfers, "tcp": dict.fromkeys(("kv", "embeddings"), slow)}
    )
    trials = Trials(profile, of_pictures, SLO)
    one = candidate("1E1PD")
    assert trials.run(replace(one, cores=0), 1.0, whole=True).ttft[0] > 1.0 + trials.run(one, 1.0).ttft[0]


def test_a_price_counts_all_cores() -> None:
    price = Price(0.36)
    assert price.per_million_tokens(made("1E1PD", 1.0)) == pytest.approx(0.36 * 2 * 1e6 / (100 * 3600))
    assert price.per_thousand_items(made("1E1PD", 1.0)) == pytest.approx(0.36 * 2 * 1e3 / (10 * 3600))


def run(*words: str) -> int:
    parsed = make_parser(["plan"]).parse_args(["plan", *words])
    code = parsed.run(parsed)
    assert isinstance(code, int)
    return code


def test_the_command_plans_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, trace = tmp_path / "profile.json", tmp_path / "trace.jsonl"
    profiles.write(example_profile(), profile)
    write_trace(trace, PICTURES.requests(2.0, 20, seed=1))
    code = run(
        *("--profile", str(profile), "--workload", str(trace), "--slo", "ttft=2s,tpot=100ms", "--json"),
        *("--topologies", "1E1PD,1EPD", "--attain", "0.9", "--price", "0.05", "--model", "demo"),
    )
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"].startswith(("1E1PD", "1EPD"))
    assert found["command"].startswith("triptych serve demo --topology 1E")
    assert {one["topology"] for one in found["candidates"]} == {"1E1PD", "1EPD"}
    assert all(one["price"]["per_million_tokens"] > 0 for one in found["candidates"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--slo", "ttft=2"), "neither a file nor one of"),
        (("--slo", "latency=2s"), "not one of ttft, tpot"),
        (("--slo", "ttft=2h"), "no time"),
        (("--slo", "ttft=2s,ttft=3s"), "once each"),
        (("--slo", "ttft=2s", "--attain", "1"), "between 0 and 1"),
        (("--slo", "ttft=2s", "--requests", "3"), "between 20 and"),
        (("--slo", "ttft=2s", "--workload", "chat", "--cores", "2", "--instances", "2"), "exclude each other"),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    profile = tmp_path / "profile.json"
    profiles.write(example_profile(), profile)
    with pytest.raises(ConfigError, match=reason):
        run("--profile", str(profile), "--workload", str(tmp_path / "none"), *words)
