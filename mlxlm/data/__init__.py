"""Text into token shards, and shards into batches."""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.data.batches import Batch, TrainBatches
    from mlxlm.data.dataset import TokenDataset
    from mlxlm.data.manifest import Manifest
    from mlxlm.data.options import DataOptions, parse_weighted_sources
    from mlxlm.data.preparation import prepare
    from mlxlm.data.sources import read_documents, read_texts, total_bytes
    from mlxlm.data.text import BadInput, Document
    from mlxlm.data.tokenize import CHAT_TEMPLATE, Chunk

__all__ = [
    "CHAT_TEMPLATE",
    "BadInput",
    "Batch",
    "Chunk",
    "DataOptions",
    "Document",
    "Manifest",
    "TokenDataset",
    "TrainBatches",
    "read_documents",
    "prepare",
    "read_texts",
    "total_bytes",
    "parse_weighted_sources",
]
__getattr__ = lazy_exports(__name__)
