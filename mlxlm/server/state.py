"""What the endpoints share."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.server.metrics import Metrics
from mlxlm.server.models import Models


@dataclass(frozen=True)
class ServerState:
    """The models and metrics of a server."""

    models: Models
    metrics: Metrics
