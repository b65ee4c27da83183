"""Functions on the text of URLs: remove credentials, and name the package that reads and writes a URL.

No function of this module connects to a server.
"""

from __future__ import annotations

import re
from pathlib import Path

# protocol → package with its fsspec client. fsspec itself contains the clients of file:// and memory://.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
PACKAGES |= dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs")


def is_url(path: str | Path) -> bool:
    """Return whether an input is a URL."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def protocol_of(url: str) -> str:
    """Return the protocol of a URL in lower case: 's3'."""
    return url.partition("://")[0].lower()


def packages_of(url: str) -> list[str]:
    """Return the packages without which the URL can be neither read nor written."""
    client = PACKAGES.get(protocol_of(url))
    return ["fsspec", client] if client else ["fsspec"]


def without_secrets(text: str) -> str:
    """Return the text without the credentials in its URLs: USER:SECRET@, and the values of a query."""
    text = re.sub(r"(?<!hf:)//[^/@\s'\"]*@", "//", text)
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


def folder_fault(url: str) -> str:
    """Return the reason why checkpoints cannot be kept below `url`. '' if there is none.

    The text never contains a credential of the URL.
    """
    if "::" in url:
        return "is a chain of URLs; give the URL of one folder"
    if not is_url(url):
        return "is not a URL such as s3://BUCKET/RUN or file:///FOLDER/RUN"
    if without_secrets(url) != url:
        return (
            "contains credentials or a query, which the records of the run would show; give the URL without them, "
            "and the credentials by the client's own environment (for example AWS_ACCESS_KEY_ID, AWS_PROFILE)"
        )
    if protocol_of(url) in ("http", "https"):
        return "cannot be written: http servers accept no files; give the URL of an object store"
    if not url.partition("://")[2].strip("/"):
        return "names no folder, for example s3://BUCKET/RUN"
    return ""
