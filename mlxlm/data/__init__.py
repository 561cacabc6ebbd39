"""Text into token shards, and shards into batches."""

from mlxlm.data.bad_input import BadInput
from mlxlm.data.batches import PACKINGS, Batch, TrainBatches, validation_batches
from mlxlm.data.dataset import TokenDataset
from mlxlm.data.manifest import Manifest, Split
from mlxlm.data.prefetch import read_ahead
from mlxlm.data.prepare import prepare, training_texts
from mlxlm.data.source_weights import weighted
from mlxlm.data.sources import documents, texts, total_bytes
from mlxlm.data.text import Document
from mlxlm.data.tokenize import CHAT_TEMPLATE, ROLES, Chunk, check_role

__all__ = [
    "CHAT_TEMPLATE",
    "PACKINGS",
    "ROLES",
    "BadInput",
    "Batch",
    "Chunk",
    "Document",
    "Manifest",
    "Split",
    "TokenDataset",
    "TrainBatches",
    "check_role",
    "documents",
    "prepare",
    "read_ahead",
    "texts",
    "total_bytes",
    "training_texts",
    "validation_batches",
    "weighted",
]
