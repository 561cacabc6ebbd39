"""Key-value caches: what attention keeps of the tokens that it has seen, in memory and in files."""

from mlxlm.cache.file import read_caches, read_identity, write_caches
from mlxlm.cache.fingerprint import fingerprint
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.make import make_cache
from mlxlm.cache.options import KVOptions

__all__ = ["KVCache", "KVOptions", "fingerprint", "make_cache", "read_caches", "read_identity", "write_caches"]
