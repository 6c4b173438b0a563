"""What ``/metrics`` says, as numbers."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """One answer of ``/metrics``. Names without the prefix."""

    samples: list[tuple[str, dict[str, str], float]]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name and those labels; 0 if there are none."""
        return sum(value for one, its, value in self.samples if one == name and labels.items() <= its.items())

    def labels(self, name: str, label: str) -> set[str]:
        return {its[label] for one, its, _ in self.samples if one == name and label in its}


def scrape(client: httpx.Client) -> Scrape:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return Scrape(
        [
            (sample.name.removeprefix("triptych:"), sample.labels, sample.value)
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        ]
    )
