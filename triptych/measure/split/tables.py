"""The tables of a plan: what each of their rows and columns is."""

from collections.abc import Iterator, Mapping

from triptych.measure.split.figures import Column, Row, Table
from triptych.measure.split.plan import SLO_TPOT, SLO_TTFT, Setup, SplitPlan
from triptych.measure.split.transfers import TransferSizes
from triptych.measure.transfer.measure import FABRICS

LATENCY = (
    Column("ttft_p50", "first token, p50 (ms)"),
    Column("ttft_p99", "first token, p99 (ms)"),
    Column("tpot_p50", "time per token, p50 (ms)"),
    Column("tpot_p99", "time per token, p99 (ms)"),
)
REPEATED, NEW = "4, in turn", "each new"
"""Pictures of the requests that measure the encoder cache."""
ON, OFF = "on", "off"
KV, EMBEDDINGS = "KV", "embeddings"


def tables_of(plan: SplitPlan, threads: Mapping[str, str], sizes: TransferSizes | None) -> list[Table]:
    """Return the tables of a plan. ``threads`` are those of each topology, in words; without a ``sizes`` no transfer
    is measured."""
    found: list[Table] = []
    if "throughput" in plan.tables:
        found += [_alone(plan, threads), _closed(plan), _arrivals(plan), _processes(plan)]
    if "images" in plan.tables:
        found.append(_images(plan))
    if "cache" in plan.tables:
        found.append(_cache(plan))
    if "first-use" in plan.tables:
        found.append(_first_use(plan))
    if "transfers" in plan.tables and sizes is not None:
        found.append(_transfers(plan, sizes))
    if "resumes" in plan.tables and sizes is not None:
        found.append(_resumes(plan, sizes))
    return found


def rows_of(table: Table, setup: Setup) -> list[Row]:
    """Return the rows of a table that a service fills."""
    if table.name == "cache":
        return [row for row in table.rows if row[:2] == (setup.topology, OFF if setup.settings else ON)]
    return [row for row in table.rows if setup.topology in row and not setup.settings]


def _loads(plan: SplitPlan) -> tuple[Row, ...]:
    return tuple((mix.name, topology) for mix in plan.mixes for topology in plan.topologies)


def _alone(plan: SplitPlan, threads: Mapping[str, str]) -> Table:
    divided = "; ".join(f"`{topology}`: {shown}" for topology, shown in threads.items())
    return Table(
        "alone",
        "One request at a time",
        "All topologies run on the same cores, beside the frontend and the load generator. Threads of the instances: "
        f"{divided}. A stage's time is the sum of its work on a request, by the request's timeline; transfers may "
        "overlap with other stages.",
        ("request", "topology"),
        (
            Column("ttft", "first token (ms)"),
            Column("tpot", "time per token (ms)"),
            Column("encode", "encode (ms)"),
            Column("transfer", "transfer (ms)"),
            Column("prefill", "prefill (ms)"),
        ),
        _loads(plan),
    )


def _closed(plan: SplitPlan) -> Table:
    return Table(
        "closed",
        f"Closed loop, {plan.concurrency} at a time",
        "Each topology answers the same requests, each of them new to all caches. Processor time is that of all "
        "processes of the service, without the load generator.",
        ("request", "topology"),
        (
            Column("requests", "requests"),
            Column("failed", "failed"),
            Column("requests_per_second", "requests/s"),
            Column("tokens_per_second", "output tokens/s"),
            *LATENCY,
            Column("cpu", "processor time per request (ms)"),
        ),
        _loads(plan),
    )


def _arrivals(plan: SplitPlan) -> Table:
    given = (
        f"first token within {plan.slo_ttft:g} s" if plan.slo_ttft else f"{SLO_TTFT:g} times the time to first token"
    )
    later = f"{plan.slo_tpot:g} s per later token" if plan.slo_tpot else f"{SLO_TPOT:g} times the time per later token"
    alone = "" if plan.slo_ttft and plan.slo_tpot else f", of such a request alone on `{plan.topologies[0]}`"
    shares = " and ".join(f"{share:g}" for share in plan.rates)
    return Table(
        "arrivals",
        "Goodput with Poisson arrivals",
        f"The same requests at the same moments for each topology. Rates are {shares} of what `{plan.topologies[0]}` "
        f"answered {plan.concurrency} at a time before the first round. Goodput counts the requests within the service "
        f"level: {given}, and {later}{alone}.",
        ("request", "rate", "topology"),
        (
            Column("requests", "requests"),
            Column("failed", "failed"),
            Column("offered", "offered (requests/s)"),
            Column("goodput", "goodput (requests/s)"),
            Column("kept", "in time (%)"),
            *LATENCY,
        ),
        tuple(
            (mix.name, f"{share:g}", topology)
            for mix in plan.mixes
            for share in plan.rates
            for topology in plan.topologies
        ),
    )


def _processes(plan: SplitPlan) -> Table:
    return Table(
        "processes",
        "Processor time and memory of each process",
        "Processor time is that of the closed loop above, divided by its requests; memory is that after it. A process "
        "includes those that it starts, such as those that decode pictures; the fork server doesn't include the "
        "instances. Shared pages count whole in the resident set (RSS), and in equal parts in the proportional one "
        "(PSS).",
        ("request", "topology", "process", "stages"),
        (
            Column("cpu", "processor time per request (ms)"),
            Column("rss", "RSS (MiB)"),
            Column("pss", "PSS (MiB)"),
        ),
        tuple(
            (mix.name, setup.topology, process, stages)
            for mix in plan.mixes
            for setup in _whole(plan)
            for process, stages in setup.processes.items()
        ),
    )


def _whole(plan: SplitPlan) -> Iterator[Setup]:
    return (setup for setup in plan.setups if not setup.settings)


def _images(plan: SplitPlan) -> Table:
    return Table(
        "images",
        "Pictures per request",
        "One request at a time, its pictures new to all caches; one request a round. The prompt's tokens show to which "
        "size the model's processor brings a picture.",
        ("picture", "pictures", "topology"),
        (
            Column("tokens", "prompt tokens"),
            Column("ttft", "first token (ms)"),
            Column("total", "whole answer (ms)"),
        ),
        tuple(
            (str(size), str(count), topology)
            for size in plan.image_sizes
            for count in plan.image_counts
            for topology in plan.topologies
        ),
    )


def _cache(plan: SplitPlan) -> Table:
    return Table(
        "cache",
        "Encoder cache",
        f"Closed loop, {plan.concurrency} at a time, a picture after a text of its own, so that the prefix cache can't "
        "help. Off is `--encode-cache-mb 0`. The first use of each of the four pictures is included.",
        ("topology", "encoder cache", "pictures"),
        (
            Column("requests_per_second", "requests/s"),
            Column("ttft_p50", "first token, p50 (ms)"),
            Column("ttft_p99", "first token, p99 (ms)"),
        ),
        tuple(
            (topology, cache, pictures)
            for topology in plan.cache_topologies
            for cache in (ON, OFF)
            for pictures in (NEW, REPEATED)
        ),
    )


def _first_use(plan: SplitPlan) -> Table:
    return Table(
        "first-use",
        "First use",
        "From the start of all processes until the service is ready, then the first request of each kind, text before "
        "pictures, beside later ones of its kind.",
        ("request", "topology"),
        (
            Column("ready", "ready after (s)"),
            Column("first", "first token of the first request (ms)"),
            Column("later", "first token of later ones (ms)"),
            Column("ratio", "first ÷ later"),
        ),
        _loads(plan),
    )


def _transfers(plan: SplitPlan, sizes: TransferSizes) -> Table:
    return Table(
        "transfers",
        "Transfers, by tokens and fabric",
        "Two processes with an instance's real sender and receiver, over loopback; the rows have the model's sizes and "
        f"no meaning, so that also lengths past the model's context are measured. {sizes}. Time is from the offer "
        "until all rows have landed. The first transfer of a size also maps or registers memory. NIXL chooses its "
        "own way between processes; Mooncake uses TCP.",
        ("rows", "tokens", "fabric"),
        (
            Column("mib", "MiB"),
            Column("ms", "time (ms)"),
            Column("gb_per_s", "GB/s"),
            Column("of_memcpy", "memcpy's time ÷ time"),
            Column("first", "first (ms)"),
        ),
        tuple((kind, f"{tokens:,}", fabric) for kind in sizes.kinds for tokens in plan.tokens for fabric in FABRICS),
    )


def _resumes(plan: SplitPlan, sizes: TransferSizes) -> Table:
    return Table(
        "resumes",
        f"Resumed transfers: KV through a pool of {plan.pool_tokens:,} tokens",
        "The same processes; the receiver's pool holds fewer tokens than are sent, so the sender waits for blocks that "
        f"are consumed, and resumes. Time is until all rows are copied out, beside a pool that holds all. {sizes}.",
        ("tokens", "fabric"),
        (
            Column("resumes", "resumes"),
            Column("ms", "time (ms)"),
            Column("whole_ms", "with a pool for all (ms)"),
            Column("ratio", "time ÷ time with a pool for all"),
        ),
        tuple((f"{tokens:,}", fabric) for tokens in plan.resumed for fabric in FABRICS),
    )
