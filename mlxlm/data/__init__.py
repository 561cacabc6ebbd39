"""Text into token shards, and shards into batches."""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.data.batches import Batch, TrainBatches, prefetch, validation_batches
    from mlxlm.data.dataset import TokenDataset
    from mlxlm.data.manifest import Manifest, SplitInfo
    from mlxlm.data.options import PACKINGS, DataOptions, parse_weighted_sources
    from mlxlm.data.preparation import prepare, training_texts
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
__getattr__ = lazy_exports(__name__)
