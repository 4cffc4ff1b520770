"""Names of the published weights (openpi's PyTorch port and LeRobot's `PI0Policy`, `PI05Policy`) for our parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

_PALIGEMMA = "model.paligemma_with_expert.paligemma."
_EXPERT = "model.paligemma_with_expert.gemma_expert."
_PREFIXES = (
    ("model.vision.embeddings.", f"{_PALIGEMMA}model.vision_tower.vision_model.embeddings."),
    ("model.vision.layers.", f"{_PALIGEMMA}model.vision_tower.vision_model.encoder.layers."),
    ("model.vision.post_layernorm.", f"{_PALIGEMMA}model.vision_tower.vision_model.post_layernorm."),
    ("model.projector.", f"{_PALIGEMMA}model.multi_modal_projector.linear."),
    ("model.language.", f"{_PALIGEMMA}model.language_model."),
    ("model.expert.lm_head.", f"{_EXPERT}lm_head."),
    ("model.expert.", f"{_EXPERT}model."),
)
"""(our prefix, the published one); the first that fits counts, every other name is the same on both sides."""
OWN_MODULES = ("critic.", "noise_head.")
"""Prefixes of what no published policy has; these names stay as they are."""
LANGUAGE_HEAD = f"{_PALIGEMMA}lm_head.weight"
"""The language model's vocabulary head: a second copy of the token embedding, which nothing reads."""
LANGUAGE_EMBEDDING = f"{_PALIGEMMA}model.language_model.embed_tokens.weight"
_EXPERT_HEAD = f"{_EXPERT}lm_head.weight"


def to_published(name: str) -> str:
    """The published name of one of our parameters."""
    return _swap(name, _PREFIXES)


def from_published(name: str) -> str:
    """Our name of a published parameter, the inverse of `to_published`."""
    return _swap(name, [(published, ours) for ours, published in _PREFIXES])


def published_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under published names; with both vocabulary heads where the expert's is carried."""
    published = {to_published(name): tensor for name, tensor in weights.items()}
    if _EXPERT_HEAD in published:
        published[LANGUAGE_HEAD] = published[LANGUAGE_EMBEDDING].clone()
    return published


def own_name(name: str, others: frozenset[str]) -> str | None:
    """Our name of a tensor in a published file that also holds `others`; None for the head that repeats the embedding.

    openpi's files store the embedding only as the head, LeRobot's store both; files written before the `model.` level
    existed lack that prefix.
    """
    if name.startswith(OWN_MODULES):
        return name
    if not name.startswith("model."):
        return own_name(f"model.{name}", frozenset(f"model.{other}" for other in others))
    if name == LANGUAGE_HEAD:
        return None if LANGUAGE_EMBEDDING in others else from_published(LANGUAGE_EMBEDDING)
    return from_published(name)


def _swap(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for before, after in prefixes:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name
