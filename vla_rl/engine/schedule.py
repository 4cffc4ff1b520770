"""The learning rate as a pure function of the update, so that a resume needs nothing but the counter."""

from __future__ import annotations

import math

from vla_rl.engine.config import EngineConfig

ONE_CYCLE_START_FRACTION = 1 / 25
"""Learning rate of a one-cycle schedule's first update over its peak (`div_factor` of torch's OneCycleLR)."""


def learning_rate(config: EngineConfig, update: int, total_updates: int) -> float:
    """Learning rate of update number `update` (from 0) of `total_updates`.

    `one_cycle` follows Smith and Topin (2018) as torch's `OneCycleLR` does with cosine annealing, with
    `pct_start = warmup_fraction`; beyond the last update the rate stays where it ended.
    """
    last = max(total_updates - 1, 1)
    if config.schedule == "one_cycle":
        return config.lr * _one_cycle(min(update, last), last, config.warmup_fraction, config.final_lr_fraction)
    warmup_updates = round(config.warmup_fraction * total_updates)
    if update < warmup_updates:
        return config.lr * (update + 1) / warmup_updates
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (update - warmup_updates) / max(last - warmup_updates, 1))
    return config.lr * _cosine(1.0, config.final_lr_fraction, progress)


def _one_cycle(update: int, last: int, rise_fraction: float, final_fraction: float) -> float:
    peak = rise_fraction * (last + 1) - 1
    if update <= peak:
        return _cosine(ONE_CYCLE_START_FRACTION, 1.0, update / peak if peak > 0 else 1.0)
    start = max(peak, 0.0)
    return _cosine(1.0, final_fraction, (update - start) / max(last - start, 1e-12))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
