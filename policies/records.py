"""What a learner needs of a sampled chunk: from a policy's output to the episode's record, and from records to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vla_rl.episode import FlowRecord, TokenRecord
from vla_rl.policies.base import PolicyOutput, RecordBatch, TokenBatch, TransitionBatch


def record_of(output: PolicyOutput, row: int) -> FlowRecord | TokenRecord | None:
    """One row's record; None if the policy acted deterministically."""
    if output.log_prob_BC is None:
        return None
    log_prob_C = output.log_prob_BC[row].float().cpu().numpy()
    if output.tokens_BT is not None and output.token_mask_BT is not None:
        return TokenRecord(
            tokens=output.tokens_BT[row].cpu().numpy(),
            mask=output.token_mask_BT[row].cpu().numpy(),
            log_prob_C=log_prob_C,
            well_formed=None if output.well_formed_B is None else bool(output.well_formed_B[row]),
        )
    assert output.x_t_BKCA is not None and output.x_next_BKCA is not None and output.denoise_index_BK is not None
    return FlowRecord(
        x_t=output.x_t_BKCA[row].float().cpu().numpy(),
        x_next=output.x_next_BKCA[row].float().cpu().numpy(),
        denoise_index=output.denoise_index_BK[row].cpu().numpy(),
        log_prob_C=log_prob_C,
    )


def stack_records(records: Sequence[FlowRecord | TokenRecord]) -> RecordBatch:
    """The records of some chunks as tensors on the CPU. Raises ValueError for records of different families."""
    flows = [record for record in records if isinstance(record, FlowRecord)]
    tokens = [record for record in records if isinstance(record, TokenRecord)]
    if flows and tokens:
        raise ValueError(f"{len(flows)} chunks were recorded by a flow policy and {len(tokens)} by a token policy; train on one kind")
    if tokens:
        return TokenBatch(
            torch.stack([torch.from_numpy(record.tokens) for record in tokens]),
            torch.stack([torch.from_numpy(record.mask) for record in tokens]),
        )
    return TransitionBatch(
        torch.stack([torch.from_numpy(record.x_t) for record in flows]),
        torch.stack([torch.from_numpy(record.x_next) for record in flows]),
        torch.stack([torch.from_numpy(record.denoise_index) for record in flows]),
    )
