"""Folders on the Hugging Face hub."""

from pathlib import Path
from typing import TypedDict

from huggingface_hub import HfApi


class HubOptions(TypedDict, total=False):
    """Options of a push. The hub's own defaults are used for what is left out."""

    private: bool
    token: str
    revision: str
    create_pr: bool
    commit_message: str


def upload(folder: Path, repo_id: str, options: HubOptions) -> str:
    """Create a repository unless it exists, upload a folder as one commit, and return the commit's address."""
    api = HfApi(token=options.get("token"))
    repo_id = api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=options.get("commit_message", "Upload a policy"),
        revision=options.get("revision"),
        create_pr=options.get("create_pr"),
    )
    return str(commit.pr_url or commit.commit_url)
