"""Names of the published weights (LeRobot's `GrootPolicy`, NVIDIA's N1.7 and N1.6 folders) for our parameters."""

from __future__ import annotations

OWN_MODULES = ("critic.", "noise_head.", "model.backbone.vision.", "model.backbone.projector.", "model.backbone.language.")
"""Prefixes of what no published policy has; these names stay as they are."""
_LEROBOT = "_groot_model."
"""LeRobot's prefix of every name; NVIDIA's folder has none."""
_VLM = "model.backbone.vlm."
_PUBLISHED_VLM = "backbone.model.model."
_LANGUAGE_HEADS = ("backbone.model.lm_head.weight", "backbone.model.language_model.lm_head.weight")
"""The vocabulary head of N1.7 and of N1.6: the same tensor as the token embedding, which nothing reads."""


def to_published(name: str) -> str:
    """LeRobot's name of one of our parameters."""
    if name.startswith(OWN_MODULES):
        return name
    if name.startswith(_VLM):
        return _LEROBOT + _PUBLISHED_VLM + name.removeprefix(_VLM)
    return _LEROBOT + name.removeprefix("model.")


def own_name(name: str) -> str | None:
    """Our name of a tensor in LeRobot's or NVIDIA's file; None for the vocabulary head."""
    if name.startswith(OWN_MODULES):
        return name
    bare = name.removeprefix(_LEROBOT)
    if bare in _LANGUAGE_HEADS:
        return None
    if bare.startswith(_PUBLISHED_VLM):
        return _VLM + bare.removeprefix(_PUBLISHED_VLM)
    return f"model.{bare}"
