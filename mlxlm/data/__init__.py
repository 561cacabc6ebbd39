"""Text into token shards, and shards into batches."""

from mlxlm.data.batches import PACKINGS, Batch, TrainBatches, validation_batches
from mlxlm.data.dataset import TokenDataset
from mlxlm.data.manifest import Manifest, SplitInfo
from mlxlm.data.options import DataOptions, parse_weighted_sources
from mlxlm.data.prefetch import prefetch
from mlxlm.data.prepare import prepare, training_texts
from mlxlm.data.sources import read_documents, read_texts, total_bytes
from mlxlm.data.text import BadInput, Document
from mlxlm.data.tokenize import CHAT_TEMPLATE, Chunk, check_role

__all__ = [
    "CHAT_TEMPLATE",
    "PACKINGS",
    "BadInput",
    "Batch",
    "Chunk",
    "DataOptions",
    "Document",
    "Manifest",
    "SplitInfo",
    "TokenDataset",
    "TrainBatches",
    "check_role",
    "read_documents",
    "prepare",
    "prefetch",
    "read_texts",
    "total_bytes",
    "training_texts",
    "validation_batches",
    "parse_weighted_sources",
]
