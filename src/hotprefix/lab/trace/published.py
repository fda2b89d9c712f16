"""The public traces that our figures rest on. Owns: where each comes from, how to get it, and whether a file
is the same.

Rules: a digest is of the uncompressed content, so it is the same for a file as published and for a compressed
copy. Nothing is fetched here, and no trace is part of this project.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from hotprefix.lab.trace.lines import whole_content

SUFFIXES: Final = ("", ".gz", ".zst")
_RAW: Final = "https://raw.githubusercontent.com"


@dataclass(frozen=True, slots=True)
class Published:
    """One public trace.

    name: the file's name, without `.gz` or `.zst`.
    repository, commit, path: of the original.
    licence: of the original.
    sha256: of the uncompressed content.
    gathered: the options of `hotprefix trace gather` that make the file from many; None: it is the original
    itself.
    """

    name: str
    repository: str
    commit: str
    path: str
    licence: str
    sha256: str
    gathered: str | None = None

    def steps(self, folder: str) -> tuple[str, ...]:
        """The shell commands that make the file. folder: the folder's name in these commands."""
        target = f"{folder}/{self.name}"
        if self.gathered is None:
            return (f"curl -fLo {target} {_RAW}/{self.repository}/{self.commit}/{self.path}",)
        checkout = self.repository.partition("/")[2]
        return (
            f"git clone https://github.com/{self.repository} && git -C {checkout} checkout {self.commit}",
            f"hotprefix trace gather {checkout}/{self.path} {self.gathered} --out {target}.gz",
        )


_MOONCAKE: Final = ("kvcache-ai/Mooncake", "3b5a594133958449a1feaf1c9e0fc1b553e34a28")
_AZURE: Final = ("Azure/AzurePublicDataset", "b469a113cedca53ddc3bdea71a143dc4b7d8700c")
_TESTER: Final = ("callanjfox/kv-cache-tester", "94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf")
PUBLISHED: Final = (
    Published(
        "mooncake_fast25_conversation_b512.jsonl", *_MOONCAKE,
        "FAST25-release/traces/conversation_trace.jsonl", "Apache-2.0",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    Published(
        "mooncake_fast25_synthetic_b512.jsonl", *_MOONCAKE,
        "FAST25-release/traces/synthetic_trace.jsonl", "Apache-2.0",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    Published(
        "azure_llm_2023_code.csv", *_AZURE, "data/AzureLLMInferenceTrace_code.csv", "CC-BY-4.0",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    Published(
        "azure_llm_2023_conv.csv", *_AZURE, "data/AzureLLMInferenceTrace_conv.csv", "CC-BY-4.0",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    Published(
        "cc_weka_sessions_b64.jsonl", *_TESTER, "traces", "Apache-2.0",
        "7932f9b031c17a36e6b41096e1c7c0c60b2caccd3ad42423c41c1675b5354270", "--max-bytes 4194303",
    ),
)  # fmt: skip


class CopyState(StrEnum):
    """The state of a trace's file in a user's folder."""

    SAME = "same"
    DIFFERS = "differs"
    ABSENT = "absent"


def find(name: str, folder: Path) -> Path | None:
    """The file of that name in the folder, compressed or not; None if there is none."""
    paths = (folder / (name + suffix) for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def check(one: Published, folder: Path) -> CopyState:
    """Compare the folder's file with the published one. Raises BadTrace if it cannot be read."""
    path = find(one.name, folder)
    if path is None:
        return CopyState.ABSENT
    digest = hashlib.sha256()
    for piece in whole_content(path):
        digest.update(piece)
    return CopyState.SAME if digest.hexdigest() == one.sha256 else CopyState.DIFFERS
