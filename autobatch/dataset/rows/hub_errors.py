"""Say in one sentence why the Hugging Face Hub does not give something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autobatch.errors import AutobatchError, DataError, ModelError


def http_errors() -> tuple[type[BaseException], ...]:
    """Return the errors of the Hub's library and of the HTTP library that it uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *(base for base in HfHubHTTPError.__bases__ if base is not OSError))


@contextmanager
def hub_errors_told(repo: str, revision: str | None, kind: str) -> Iterator[None]:
    """Turn what the Hub's library raises into one sentence: a DataError, for a model ModelError."""
    from huggingface_hub.errors import HFValidationError

    kinds: tuple[type[BaseException], ...] = (HFValidationError, *http_errors())
    try:
        yield
    except AutobatchError:
        raise
    except kinds as error:
        word = "data set" if kind == "dataset" else "model"
        sentence = _sentence(error, repo, revision, kind, word)
        raise (DataError if kind == "dataset" else ModelError)(sentence) from error


def _sentence(error: BaseException, repo: str, revision: str | None, kind: str, word: str) -> str:
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    host = constants.ENDPOINT
    page = f"{host}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    cause = error.__cause__ if isinstance(error.__cause__, hub.HfHubHTTPError) else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, hub.GatedRepoError):
        return (
            f"the {word} {repo} is gated, and "
            + ("the token in use was not let in" if get_token() else "no token is set")
            + f"; ask for access at {page}, then set HF_TOKEN or run `hf auth login`"
        )
    if isinstance(cause, hub.RevisionNotFoundError):
        return f"the {word} {repo} has no revision {revision!r}; look at {page}/commits/main"
    if isinstance(cause, hub.RepositoryNotFoundError):
        return (
            f"{repo} is neither a path here nor a {word} that {host} shows "
            + ("to the token in use" if get_token() else "without a token")
            + "; correct the name, or set HF_TOKEN if it is private"
        )
    if status in (401, 403):
        return f"{host} refuses {repo} ({status}); check HF_TOKEN, or run `hf auth login`"
    if isinstance(error, getattr(hub, "IncompleteSnapshotError", ())):  # huggingface_hub 2
        return (
            f"{repo} is only in part in the Hub's cache, and the Hub cannot be reached; "
            f"fetch it where there is a network: {download_command(repo, kind)}"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"{repo} is neither a path here nor in the Hub's cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE is set; unset it, or fetch it where there is a network: "
            + download_command(repo, kind)
        )
    if isinstance(cause, hub.HFValidationError):
        return f"{repo} is neither a path here nor a name of the Hub's; correct it"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return (
            f"cannot keep {repo} in the Hub's cache {constants.HF_HUB_CACHE} "
            f"({error.strerror}); set HF_HOME to a folder with space that you may write"
        )
    if status is not None:
        return f"{host} fails on {repo} ({status}); try again later, or set HF_ENDPOINT to a mirror"
    reason = str(error.__cause__ or error).strip().splitlines()
    return (
        f"{repo} is no path here, and {host} cannot be reached "
        f"({(reason or [type(error).__name__])[0][:120]}); correct the path, set HF_ENDPOINT to a "
        f"mirror, or fetch it where there is a network: {download_command(repo, kind)}"
    )


def download_command(repo: str, kind: str) -> str:
    """Return the command that fetches a whole repository into the Hub's cache."""
    return f"hf download {repo}" + (" --repo-type dataset" if kind == "dataset" else "")
