"""Losses on held-out episodes during `vla-rl sft`, and whether the policy reads its prompt.

A mean over all samples hides whether words matter: in the middle of a demonstration the pictures and the state show where the hand is
going, and only its first picture leaves that to the prompt. So first pictures have losses of their own, under their prompt and under
another one. Where the two are alike, the policy does not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.samples import EpisodeDataset
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import World
from vla_rl.episode import Int64
from vla_rl.phases.sft_batches import noise_draws, training_batch
from vla_rl.policies.module import PolicyModule

OWN_PROMPT, OTHER_PROMPT = "first_picture_loss/own_prompt", "first_picture_loss/other_prompt"
"""Metrics: the mean loss of first pictures under the prompt of their episode, and under another prompt."""
READS = 1.5
"""A policy whose loss grows by less than this factor under another prompt is said to hardly read it. On ten LIBERO scenes with six named
objects each the factor was 1.4 where the named one was taken in 30 % of episodes, and 7 at 80 % (docs/policies.md)."""


@dataclass(frozen=True)
class Validation:
    """What is held out, and how its losses are computed."""

    dataset: EpisodeDataset
    seed: int
    """Of the noise, which is the same at every update."""
    samples: int
    """Most samples of one loss."""
    rows: int
    """Samples of one forward pass of one rank."""
    draws: int
    """Noises and flow times of each first picture; other samples have one."""


def validation_losses(engine: Engine, policy: PolicyModule, validation: Validation) -> dict[str, float]:
    """`validation_loss`, and the two losses of first pictures where the held-out episodes have several prompts; by the averaged weights
    where there are some."""
    dataset, world = validation.dataset, engine.world
    first_X, others = np.flatnonzero(dataset.sample_positions_X == 0), other_prompts(dataset.infos)
    own = [info.prompt for info in dataset.infos]
    with engine.averaged_weights():
        losses = {"validation_loss": _loss(engine, policy, validation, np.arange(len(dataset)), own, draws=1)}
        if others and len(first_X) >= world.size:
            losses[OWN_PROMPT] = _loss(engine, policy, validation, first_X, own, validation.draws)
            losses[OTHER_PROMPT] = _loss(engine, policy, validation, first_X, others, validation.draws)
    return losses


def prompt_verdict(own: float, other: float) -> str:
    """What the two losses of first pictures say, in a sentence."""
    text = f"first pictures of held-out episodes: loss {own:.3g} under their prompt, {other:.3g} under another one"
    return text if other >= READS * own else f"{text}; the policy hardly reads its prompt (docs/policies.md, When the prompt has to decide)"


def other_prompts(infos: Sequence[EpisodeInfo]) -> list[str]:
    """For each episode a prompt that is not its own: of its scene (suite and task) where that has several, else of any. Empty where all
    episodes have one prompt."""
    everywhere = sorted({info.prompt for info in infos})
    if len(everywhere) < 2:
        return []
    of_scene: dict[tuple[str, int], set[str]] = {}
    for info in infos:
        of_scene.setdefault((info.spec.suite, info.spec.task), set()).add(info.prompt)
    prompts = {scene: sorted(found) if len(found) > 1 else everywhere for scene, found in of_scene.items()}
    return [_next(info.prompt, prompts[info.spec.suite, info.spec.task]) for info in infos]


def _next(prompt: str, prompts: Sequence[str]) -> str:
    return prompts[(prompts.index(prompt) + 1) % len(prompts)]


def _loss(engine: Engine, policy: PolicyModule, validation: Validation, candidates_X: Int64, prompts: Sequence[str], draws: int) -> float:
    """The mean loss of evenly spaced candidates, with the prompts of their episodes replaced."""
    dataset, world, sums = validation.dataset, engine.world, np.zeros(2)
    places = candidates_X[validation_places(len(candidates_X), validation.samples, world)]
    for start in range(0, len(places), validation.rows):
        chosen = places[start : start + validation.rows]
        samples = dataset.batch(dataset.columns(chosen, policy.spec.chunk_length))
        told = [prompts[episode] for episode in dataset.sample_episodes_X[chosen]]
        samples.observations = [replace(seen, prompt=prompt) for seen, prompt in zip(samples.observations, told, strict=True)]
        batch = training_batch(policy, samples, slice(None)).to(world.device)
        seeds = [seed for seeds in noise_draws(validation.seed, "validation", chosen.tolist(), draws) for seed in seeds]
        result = engine.infer(lambda policy, batch=batch, seeds=seeds: policy.sft_loss(batch, seeds))
        sums += [float(result.loss_sum), float(result.count)]
    loss_sum, count = world.sum(sums.tolist())
    return loss_sum / count


def validation_places(samples: int, most: int, world: World) -> Int64:
    """int64: this rank's share of at most `most` of `samples`; every rank gets equally many, because every rank must enter the policy
    equally often."""
    chosen = np.unique(np.linspace(0, samples - 1, min(samples, most)).round().astype(np.int64))
    if len(chosen) < world.size:
        raise ConfigError(
            f"{samples} validation samples cannot be shared by {world.size} ranks; raise data.validation_fraction, or set it to 0"
        )
    return chosen[: len(chosen) // world.size * world.size][world.rank :: world.size]
