"""Text into token shards, and shards into batches."""

from mlxlm.data.batches import Batch, TrainBatches, validation_batches
from mlxlm.data.dataset import TokenDataset
from mlxlm.data.manifest import Manifest, Split
from mlxlm.data.prepare import prepare
from mlxlm.data.sources import Document, documents, texts, total_bytes
from mlxlm.data.tokenize import CHAT_TEMPLATE

__all__ = [
    "CHAT_TEMPLATE",
    "Batch",
    "Document",
    "Manifest",
    "Split",
    "TokenDataset",
    "TrainBatches",
    "documents",
    "prepare",
    "texts",
    "total_bytes",
    "validation_batches",
]
