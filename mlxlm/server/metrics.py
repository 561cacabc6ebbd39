"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxlm.backend import platform
from mlxlm.generation import GenerationResult
from mlxlm.server.models import Models

MODEL = "mlxlm.model"  # key of a request's scope: the name of the model that answers it

_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of a server. Their names begin with mlxlm_."""

    def __init__(self, models: Models):
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self.requests = counter("mlxlm_requests", "Requests", ["endpoint", "status"])
        self.prompt_tokens = counter("mlxlm_prompt_tokens", "Tokens of prompts", ["model"])
        self.cached_tokens = counter("mlxlm_cached_tokens", "Tokens of prompts found in the prefix cache", ["model"])
        self.generated_tokens = counter("mlxlm_generated_tokens", "Generated tokens", ["model"])
        seconds = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        self.duration = seconds(
            "mlxlm_request_duration_seconds", "From the request to the end of the response", ["endpoint", "model"]
        )
        self.first_token = seconds("mlxlm_time_to_first_token_seconds", "Time to the first token", ["model"])
        self.queue = seconds("mlxlm_queue_seconds", "Time until the engine began to read the prompt", ["model"])
        self.inter_token = seconds(
            "mlxlm_inter_token_seconds", "Time between two tokens of a text", ["model"], buckets=_TOKEN_SECONDS
        )
        self.registry.register(_Gauges(models))

    def add_result(self, model: str, result: GenerationResult) -> None:
        """Count the tokens of a text that has ended or was cancelled."""
        self.prompt_tokens.labels(model).inc(result.prompt_tokens)
        self.cached_tokens.labels(model).inc(result.cached_tokens)
        self.generated_tokens.labels(model).inc(len(result.tokens))
        if result.timings.queue_seconds is not None:
            self.queue.labels(model).observe(result.timings.queue_seconds)


class _Gauges(Collector):
    """The state of the engines and the memory of the process, read whenever the metrics are rendered."""

    def __init__(self, models: Models):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        loaded = self._models.loaded
        stats = {model.name: model.engine.stats for model in loaded}
        for name, text in (
            ("running", "Texts that are being generated"),
            ("waiting", "Texts that wait for others"),
            ("paused", "Texts that wait for slow clients"),
            ("kv_bytes", "Memory of the key-value caches"),
            ("prefix_cache_bytes", "Memory of the prefix cache"),
        ):
            gauge = GaugeMetricFamily(f"mlxlm_{name}", text, labels=["model"])
            for model_name, values in stats.items():
                gauge.add_metric([model_name], getattr(values, name))
            yield gauge
        gauge = GaugeMetricFamily("mlxlm_model_load_seconds", "Time it took to load the model", labels=["model"])
        for model in loaded:
            gauge.add_metric([model.name], model.load_seconds)
        yield gauge
        memory = platform.process_memory()
        yield GaugeMetricFamily("mlxlm_process_resident_memory_bytes", "Memory of the process", memory)
