"""Numbers for Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sequencematch.serving.settings import Served

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """A registry of its own: two servers in a process don't share numbers."""

    def __init__(self, served: Mapping[str, Served]) -> None:
        """Numbers of engines are read when they are asked for."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sequencematch_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.hold_back = Histogram(
            "sequencematch_hold_back_seconds",
            "From the writing of a token to its sending.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first = Histogram(
            "sequencematch_first_text_seconds",
            "From a request to its first text or action.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_Engines(served))

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return generate_latest(self.registry)


class _Engines:
    def __init__(self, served: Mapping[str, Served]) -> None:
        self.served = served

    def collect(self) -> Iterator[Any]:
        gauges = {
            "queue": ("Rows that wait for a slot.", lambda engine: len(engine.waiting)),
            "slots": ("Rows that can be decoded at the same time.", lambda engine: engine.slots),
            "slots_in_use": ("Rows being decoded.", lambda engine: len(engine.running)),
        }
        counters = {
            "actions": ("Actions taken.", lambda engine: engine.counts.actions),
            "deletions": ("Tokens deleted.", lambda engine: engine.counts.deletions),
            "forward_passes": ("Forward passes of the model.", lambda engine: engine.counts.forward_passes),
            "rejected": ("Rows that found the queue full.", lambda engine: engine.counts.rejected),
        }
        for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (what, read) in numbers.items():
                family = kind(f"sequencematch_{name}", what, labels=["model"])
                for model, served in self.served.items():
                    family.add_metric([model], read(served.engine))
                yield family
        ended = CounterMetricFamily("sequencematch_rows", "Rows that ended.", labels=["model", "why"])
        for model, served in self.served.items():
            for why, number in served.engine.counts.ended.items():
                ended.add_metric([model, why], number)
        yield ended
