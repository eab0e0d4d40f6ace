"""relight under `torch.distributed.checkpoint`: the same calls, relight's format, digests and commit.

::

    import torch.distributed.checkpoint as dcp
    import relight.dcp

    dcp.save(state_dict, storage_writer=relight.dcp.Writer("runs/gpt", step=1000))
    dcp.load(state_dict, storage_reader=relight.dcp.Reader("runs/gpt"))

Importing this module loads torch. See docs/dcp.md.
"""

from __future__ import annotations

from relight.errors import MissingExtraError

try:
    from relight.checkpoint.dcp_reader import Reader
    from relight.checkpoint.dcp_source import has_checkpoint
    from relight.checkpoint.dcp_staging import ensure_background
    from relight.checkpoint.dcp_writer import Writer
except ModuleNotFoundError as error:
    if error.name not in ("torch", "numpy"):
        raise
    raise MissingExtraError("relight.dcp needs torch: pip install 'relight[torch]'") from error

__all__ = ["Reader", "Writer", "ensure_background", "has_checkpoint"]
