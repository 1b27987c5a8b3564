"""What handlers get from the outside: `ctx.services`. Built once per worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .documents import Missing
from .providers import AIProvider

__all__ = ["Pool", "Services"]

T = TypeVar("T")


class Pool(Protocol):
    """Runs CPU-bound or risky functions in processes that can be killed (`patterns/isolation.py`)."""

    async def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        memory_limit: int | None = None,
    ) -> T: ...


@dataclass(frozen=True, slots=True)
class Services:
    provider: AIProvider
    pool: Pool
    blob_dir: Path
    max_document_bytes: int = 50 * 1024 * 1024

    def blob(self, reference: str) -> Path:
        """Where an uploaded file lies. A reference that leads out of the folder is refused."""
        path = (self.blob_dir / reference).resolve()
        if not path.is_relative_to(self.blob_dir.resolve()):
            raise Missing("The uploaded file is no longer there. Upload it again.")
        return path
