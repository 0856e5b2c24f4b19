"""Find files behind URLs, through fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from autobatch.errors import DataError

# Protocol -> the plug-in that pip installs, the command that copies.
_PLUGINS = {
    "s3": ("s3fs", "aws s3 cp {url} ."),
    "s3a": ("s3fs", "aws s3 cp {url} ."),
    "gs": ("gcsfs", "gcloud storage cp {url} ."),
    "gcs": ("gcsfs", "gcloud storage cp {url} ."),
    "oss": ("ossfs", "ossutil cp {url} ."),
    "tos": ("tosfs", "tosutil cp {url} ."),
    "az": ("adlfs", "azcopy copy {url} ."),
    "abfs": ("adlfs", "azcopy copy {url} ."),
    "abfss": ("adlfs", "azcopy copy {url} ."),
    "hdfs": ("pyarrow", "hdfs dfs -get {url} ."),
    "http": ("aiohttp", "curl -LO {url}"),
    "https": ("aiohttp", "curl -LO {url}"),
    "sftp": ("paramiko", "scp"),
    "ssh": ("paramiko", "scp"),
}
# What servers call the state of a file, the surest first.
_VERSION_KEYS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "checksum", "generation"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created"),
)
_BLOCK_BYTES = 8 * 2**20  # read ahead: a request a block


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as its server describes it now."""

    url: str
    size_bytes: int
    version: str


def is_url(name: str) -> bool:
    """Return whether a name is a URL (s3://..., https://...)."""
    protocol = name.partition("://")[0]
    return "://" in name and protocol.replace("+", "").replace(":", "").replace("-", "").isalnum()


def find(url: str) -> list[str]:
    """Return the URLs of the files that a URL, a folder or a glob names, sorted.

    Raises:
        DataError: if its plug-in is missing, its server does not answer, or nothing is there.
    """
    fs, path = _file_system(url)
    is_web = url.startswith(("http://", "https://"))  # its ? begins a query, it has no folders
    with _one_sentence(url):
        if any(sign in path for sign in "*?[") and not is_web:
            found = [fs.unstrip_protocol(p) for p in sorted(fs.glob(path)) if fs.isfile(p)]
        elif not is_web and fs.isdir(path):
            listed = sorted(fs.ls(path, detail=True), key=lambda info: info["name"])
            found = [fs.unstrip_protocol(i["name"]) for i in listed if i["type"] == "file"]
        else:
            return [url]
    if not found:
        raise DataError(f"{url} names no file; check the path")
    return found


def stat(url: str) -> RemoteFile:
    """Return size and version of the file behind a URL.

    Raises:
        DataError: if it is missing, may not be read, or its server does not tell its size.
    """
    fs, path = _file_system(url)
    with _one_sentence(url):
        fs.invalidate_cache()
        info = fs.info(path)
        known = [info[key] for key in _VERSION_KEYS if info.get(key) is not None]
        version = str(known[0]) if known else str(fs.checksum(path))
    if info.get("size") is None:
        raise DataError(
            f"the server of {url} does not tell its size; copy it: {_copy_command(url)}"
        )
    return RemoteFile(url=url, size_bytes=int(info["size"]), version=version)


@contextmanager
def open_bytes(url: str) -> Iterator[IO[bytes]]:
    """Give the bytes behind a URL, fetched block by block as they are read; it can seek.

    Raises:
        DataError: if it cannot be opened.
    """
    fs, path = _file_system(url)
    with _one_sentence(url):
        stream = fs.open(path, "rb", block_size=_BLOCK_BYTES)
    with stream:
        yield stream


def broken_off(url: str, error: BaseException) -> DataError:
    """Return the error of a URL whose server failed while it was read."""
    return DataError(f"cannot read {url} ({_reason(error)}); try again, or {_copy_hint(url)}")


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec  # slow to import: `autobatch --help` must answer at once

    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        plugin = _PLUGINS[protocol][0] if protocol in _PLUGINS else None
        install = f"pip install {plugin}" if plugin else str(error).rstrip(".")
        raise DataError(
            f"{url} needs a plug-in for {protocol}:// that is not installed; {install}, "
            f"or {_copy_hint(url)}"
        ) from error
    except Exception as error:  # a plug-in connects here, and raises errors of its own kinds
        known = protocol in _PLUGINS or protocol in fsspec.available_protocols()
        reason = _reason(error) if known else f"{protocol}:// is no known protocol"
        raise DataError(f"cannot read {url} ({reason}); {_copy_hint(url)}") from error
    return fs, path


@contextmanager
def _one_sentence(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{url} does not exist; check the path") from error
    except DataError:
        raise
    except Exception as error:  # every plug-in raises errors of its own kinds
        raise DataError(
            f"cannot read {url} ({_reason(error)}); check the address and your credentials "
            f"for it, or {_copy_hint(url)}"
        ) from error


def _copy_command(url: str) -> str:
    protocol = url.partition("://")[0].rpartition("::")[2]
    return _PLUGINS.get(protocol, ("", ""))[1].format(url=url)


def _copy_hint(url: str) -> str:
    command = _copy_command(url)
    return f"copy it here: {command}" if command else "copy the file here and name the copy"


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
