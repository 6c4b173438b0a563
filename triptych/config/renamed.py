"""Former names, which are refused for one release with the name that replaces them."""

RENAMED_SETTINGS = {
    "max_held_mb": "max_inflight_mb",
    "named_media_mb": "mm_uuid_cache_mb",
    "kv_memory": "kv_cache_memory",
    "max_queue_per_caller": "max_queue_per_client",
}
"""Former name → name of a setting: of its flag, its variable and its key in a file."""

RENAMED_ROLES = {"front-door": "frontend"}
"""Former name → name, of ``--role``."""
