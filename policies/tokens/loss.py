"""The supervised loss of a token policy: cross-entropy, as sums.

Shape legend: B batch;  C actions per chunk;  D = 7 real action dimensions;  R reasoning tokens;  N action tokens;
              W tokens that are allowed at a position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.episode import ACTION_DIM
from vla_rl.policies.base import LossSums
from vla_rl.policies.flow_policy import ACTION_PARTS


def token_loss_sums(
    text_logits_BRW: Tensor,
    action_logits_BNW: Tensor,
    text_BR: Tensor,
    text_mask_BR: Tensor,
    actions_BN: Tensor,
    token_mask_BN: Tensor,
    action_mask_BC: Tensor,
    weight_B: Tensor | None,
    reasoning_weight: float,
    fixed_length: bool,
) -> LossSums:
    """Sums over the same count as a flow policy's: rows' weights times real actions times 7.

    With a fixed number of tokens, those of padded actions do not count, and the parts of an action are reported apart. Otherwise
    a chunk's tokens count as one. `accuracy` is the share of right tokens among those that count, the reasoning's among its own.
    """
    weight_B = torch.ones_like(action_mask_BC[:, 0], dtype=torch.float32) if weight_B is None else weight_B
    count = (action_mask_BC.float() * weight_B[:, None]).sum() * ACTION_DIM
    real_BN = token_mask_BN & _tokens_of_real_actions(action_mask_BC, token_mask_BN, fixed_length)
    weight_BN = real_BN.float() * weight_B[:, None]
    loss_BN = _cross_entropy(action_logits_BNW, actions_BN) * weight_BN
    loss_sum = loss_BN.sum()
    right_BN = (action_logits_BNW.argmax(-1) == actions_BN).float() * weight_BN
    metrics = {"loss_actions": loss_sum.detach(), "accuracy": _share(right_BN, weight_BN, count)}
    if fixed_length:
        parts_BCD = loss_BN.detach().unflatten(1, (-1, ACTION_DIM))
        metrics |= {f"loss_{name}": parts_BCD[..., dims].sum() for name, dims in ACTION_PARTS.items()}
    if text_BR.shape[1]:
        weight_BR = text_mask_BR.float() * (weight_B * action_mask_BC.any(1))[:, None]
        text_loss = (_cross_entropy(text_logits_BRW, text_BR) * weight_BR).sum()
        loss_sum = loss_sum + reasoning_weight * text_loss
        right_BR = (text_logits_BRW.argmax(-1) == text_BR).float() * weight_BR
        metrics |= {"loss_reasoning": text_loss.detach(), "accuracy_reasoning": _share(right_BR, weight_BR, count)}
    return LossSums(loss_sum, count, metrics)


def _tokens_of_real_actions(action_mask_BC: Tensor, token_mask_BN: Tensor, fixed_length: bool) -> Tensor:
    if fixed_length:
        return action_mask_BC.repeat_interleave(ACTION_DIM, 1)
    return action_mask_BC.any(1, keepdim=True).expand_as(token_mask_BN)


def _cross_entropy(logits_BNW: Tensor, tokens_BN: Tensor) -> Tensor:
    return F.cross_entropy(logits_BNW.mT, tokens_BN, reduction="none")


def _share(right: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    """A share of tokens as a sum over `count`, which the caller divides by."""
    return right.sum() / weight.sum().clamp(min=1e-9) * count
