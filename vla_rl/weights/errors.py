"""What can go wrong between the weights that learn and the policies that act."""

from __future__ import annotations


class WeightSyncError(RuntimeError):
    """Weights that do not fit, are older than what is there, or did not arrive."""


class LayoutMismatch(WeightSyncError):
    """Both sides do not hold the same tensors; the text lists every difference."""


class VersionError(WeightSyncError):
    """A version that is not newer than what was there: somebody would train or act on weights of the past."""


class BufferHeldError(WeightSyncError):
    """A reader did not let go of a buffer in time."""


class NotPulledError(WeightSyncError):
    """A policy was asked to act before its weights had arrived."""
