"""Key-value caches, in memory and in files."""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.cache.factory import PREFILL_STEP_SIZE, make_cache
    from mlxlm.cache.kv_cache import KVCache
    from mlxlm.cache.options import KVOptions
    from mlxlm.cache.prefix_cache import PrefixCache
    from mlxlm.cache.prefix_cache_folder import PrefixCacheFolder
    from mlxlm.cache.prompt_cache_file import fingerprint, open_prompt_cache, save_prompt_cache

__all__ = [
    "PREFILL_STEP_SIZE",
    "KVCache",
    "KVOptions",
    "PrefixCache",
    "PrefixCacheFolder",
    "fingerprint",
    "make_cache",
    "open_prompt_cache",
    "save_prompt_cache",
]
__getattr__ = lazy_exports(__name__)
