"""Upload an export to a model repository of the Hugging Face Hub with huggingface_hub (extra `hf`).

The token comes from `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frontier_llm.data.remote import reason_of
from frontier_llm.errors import CheckpointError, FrontierError, not_installed


class HubRepository:
    """Repository to which this user may write. It is created before the export, so that a refusal costs no time."""

    def __init__(self, name: str, private: bool = False) -> None:
        try:
            from huggingface_hub import HfApi
        except ModuleNotFoundError:
            raise FrontierError(not_installed("huggingface_hub", "--push-to-hub")) from None
        self.name = name
        self._api = HfApi()
        with _refusals(
            name,
            "log in with `hf auth login` or set HF_TOKEN, give the repository as USER/NAME, or export without "
            "--push-to-hub",
        ):
            self._api.create_repo(name, private=private, exist_ok=True)

    def upload(self, directory: str | Path) -> str:
        """Upload every file of an export as one commit. Returns the commit's address."""
        with _refusals(self.name, f"the export is complete; upload it later: hf upload {self.name} {directory}"):
            return str(
                self._api.upload_folder(
                    repo_id=self.name,
                    folder_path=directory,
                    commit_message="Export of frontier_llm",
                ).commit_url
            )


@contextmanager
def _refusals(name: str, fix: str) -> Iterator[None]:
    """Convert all errors of the client. Their classes depend on the client's version and its network library."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"the Hub refused the upload: {reason_of(error)}", where=name, fix=fix) from error
