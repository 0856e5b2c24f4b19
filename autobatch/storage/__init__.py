"""Records on disk: versioned JSON, YAML and JSONL, written whole or not at all."""

from autobatch.storage.files import (
    append_jsonl,
    read_json,
    read_jsonl,
    read_record,
    read_text,
    write_atomic,
    write_json,
)
from autobatch.storage.places import (
    DEFAULT_OUT,
    METRICS_FILE,
    PROFILE_FILE,
    PROFILE_PAGE_FILE,
    PROFILE_PNG_FILE,
    TRIALS_FILE,
    TUNED_FILE,
    cache_root,
    make_out_dir,
    shipped_dir,
    user_path,
)
from autobatch.storage.plain import from_plain, to_plain

__all__ = [
    "DEFAULT_OUT",
    "METRICS_FILE",
    "PROFILE_FILE",
    "PROFILE_PAGE_FILE",
    "PROFILE_PNG_FILE",
    "TRIALS_FILE",
    "TUNED_FILE",
    "append_jsonl",
    "cache_root",
    "from_plain",
    "make_out_dir",
    "read_json",
    "read_jsonl",
    "read_record",
    "read_text",
    "shipped_dir",
    "to_plain",
    "user_path",
    "write_atomic",
    "write_json",
]
