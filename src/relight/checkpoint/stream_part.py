"""A `FileStream` as the data part of a train state, by itself or in a DataLoader.

Inside a loader that is handed over, the stream is asked for records by place: the loader becomes map-style, with the
stream's sampler, so that neither order nor position hangs on workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch.utils.data import DataLoader

from relight.checkpoint.data import ElasticLoaderPart, ElasticPart
from relight.checkpoint.stream import FileStream

__all__ = ["StreamLoaderPart", "StreamPart"]


class StreamPart(ElasticPart):
    """A FileStream that the loop iterates itself."""

    kind = "stream"

    def describe(self, saved: Mapping[str, Any]) -> str:
        """Return one line about a captured position."""
        window = (
            f", {saved.get('in_window')} records into the shuffle window there"
            if saved.get("in_window")
            else ""
        )
        return (
            f"{super().describe(saved)}; file {saved.get('file')}, record {saved.get('record')}"
            f" (byte {saved.get('byte')}){window}"
        )


class StreamLoaderPart(StreamPart, ElasticLoaderPart):
    """A DataLoader around a FileStream."""

    @classmethod
    def of(cls, loader: DataLoader[Any], stream: FileStream, *, seed: int) -> Self:
        """Take charge of the position of `stream`, and of the loader that it is in."""
        return cls(loader, stream.sampler, seed=seed, source=stream.index_source(loader))
