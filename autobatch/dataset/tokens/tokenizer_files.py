"""A tokenizer's directory, without loading what lies in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from autobatch.errors import ModelError
from autobatch.storage import user_path
from autobatch.units import format_value

# Every file that can change the ids of a row.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def tokenizer_digest(directory: str) -> str:
    """Return a hash of all files that decide the ids, without loading them.

    Raises:
        ModelError: if the directory or its tokenizer.json is missing, or a file is unreadable.
    """
    folder = check_directory(directory)
    digest = hashlib.sha256()
    extra = sorted(folder.glob("additional_chat_templates/*.jinja"))
    try:
        for path in [*(folder / name for name in _FILES), *extra]:
            if path.is_file():
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    except OSError as error:
        raise _unreadable(directory, error) from error
    return digest.hexdigest()


def largest_token_id(directory: str) -> int:
    """Return the largest id a tokenizer can give, added tokens included.

    Raises:
        ModelError: if the directory or its tokenizer.json is missing or damaged.
    """
    folder = check_directory(directory)
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust reader raises bare Exception
        raise ModelError(
            f"the tokenizer in {directory} cannot be read ({first_line(error)}); "
            "download or save it again"
        ) from error
    return max(backend.get_vocab(with_added_tokens=True).values())


def check_directory(directory: str) -> Path:
    """Return the folder that a tokenizer can be loaded from.

    Raises:
        ModelError: if it or its tokenizer.json is missing, or cannot be looked at.
    """
    folder = user_path(directory)
    try:
        is_dir, is_complete = folder.is_dir(), (folder / "tokenizer.json").is_file()
    except OSError as error:
        raise _unreadable(directory, error) from error
    if not is_dir:
        raise ModelError(
            f"tokenizer directory {directory} does not exist; "
            "give a local folder that holds tokenizer.json"
        )
    if not is_complete:
        raise ModelError(
            f"{directory} has no tokenizer.json; save the fast tokenizer there, "
            "or give another folder"
        )
    return folder


def _unreadable(directory: str, error: OSError) -> ModelError:
    return ModelError(
        f"the tokenizer in {format_value(directory)[1:-1]} cannot be read "
        f"({error.strerror or error}); check the path and its permissions"
    )


def first_line(error: BaseException) -> str:
    """Return what an error says, shortly."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
