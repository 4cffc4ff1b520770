"""Protocols are data, hashed, and build every (task, init) exactly once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.conventions import Orientation
from vla_rl.episode import SPLITS
from vla_rl.eval.protocol import (
    PROTOCOLS,
    ProtocolError,
    build_specs,
    effective_protocol,
    get_protocol,
    init_names,
    protocol_differences,
    protocol_hash,
)


@pytest.mark.parametrize(
    ("name", "steps", "settle", "gripper"),
    [
        ("openvla-oft", (220, 280, 300, 520, 400), 10, -1),
        ("openpi", (220, 280, 300, 520, 400), 10, -1),
        ("lerobot", (280, 280, 300, 520, 400), 10, -1),
        ("libero", (600, 600, 600, 600, 600), 5, 0),
    ],
)
def test_published_numbers(name: str, steps: tuple[int, ...], settle: int, gripper: int) -> None:
    protocol = get_protocol(name)
    suites = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
    assert tuple(protocol.steps_of(suite) for suite in suites) == steps
    assert (protocol.settle_steps, protocol.settle_action) == (settle, (0, 0, 0, 0, 0, 0, gripper))


def test_libero_pro_suites_have_the_limit_of_their_base() -> None:
    assert get_protocol("openvla-oft").steps_of("libero_10_swap") == 520
    assert get_protocol("openvla-oft").steps_of("libero_object_lan") == 280


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(ProtocolError, match="did you mean 'openvla-oft'"):
        get_protocol("openvla_oft")
    with pytest.raises(ProtocolError, match="did you mean 'libero_object'"):
        get_protocol("openpi").steps_of("libero_objects")
    with pytest.raises(ProtocolError, match="allowed: openvla-oft, openpi, lerobot, libero, sampled"):
        get_protocol("")


def test_every_shaping_field_changes_the_hash() -> None:
    protocol = get_protocol("openpi")
    others: dict[str, object] = {
        "max_steps": (("libero_object", 281),),
        "settle_steps": 11,
        "settle_action": (0.0,) * 7,
        "resolution": 128,
        "orientation": Orientation.RAW,
        "executed_horizon": 8,
        "inits_per_task": 20,
        "init_source": "sampled",
        "success_rule": "last_step",
        "scene_seed": "published",
    }
    assert set(others) == {field.name for field in fields(protocol)} - {"name", "source", "published_seed"}
    hashes = [protocol_hash(replace(protocol, **{name: value})) for name, value in others.items()]
    assert len({*hashes, protocol_hash(protocol)}) == len(others) + 1
    assert protocol_hash(replace(protocol, name="other", source="elsewhere")) == protocol_hash(protocol)
    assert len({protocol_hash(p) for p in PROTOCOLS.values()}) == len(PROTOCOLS)


def test_a_departure_from_the_protocol_is_declared() -> None:
    published = get_protocol("openvla-oft")
    effective, deviations = effective_protocol(published, resolution=128, orientation=Orientation.ROTATED_180, executed_horizon=8)
    assert deviations == ["resolution: 128 in place of 256"]
    assert effective.resolution == 128 and protocol_hash(effective) != protocol_hash(published)
    assert protocol_differences(published.to_dict(), effective.to_dict()) == ["resolution: 256 against 128"]


def test_a_control_without_horizon_fits_any_policy() -> None:
    published = get_protocol("openvla-oft")
    control, deviations = effective_protocol(published, resolution=256, orientation=Orientation.ROTATED_180, executed_horizon=None)
    assert deviations == []
    assert protocol_differences(published.to_dict(), control.to_dict()) == []
    assert protocol_differences(published.to_dict(), get_protocol("openpi").to_dict()) == ["executed_horizon: 8 against 5"]


def test_deviations_count_only_where_no_field_says_the_same() -> None:
    """As evaluations record them: a control beside a policy of another horizon on fewer inits, and a replay of recorded scenes."""
    published = get_protocol("openvla-oft")
    common: dict[str, Any] = {"resolution": 256, "orientation": Orientation.ROTATED_180}
    policy, deviations = effective_protocol(published, **common, executed_horizon=5, inits_per_task=10)
    assert deviations == ["executed_horizon: 5 in place of 8", "inits_per_task: 10 in place of 50"]
    control, _ = effective_protocol(published, **common, executed_horizon=None)
    recorded = policy.to_dict() | {"deviations": deviations}
    assert protocol_differences(recorded, control.to_dict() | {"deviations": []}) == []
    inits = "inits: those of x in place of the protocol's, with the step limits they were recorded under"
    replayed = control.to_dict() | {"deviations": [inits]}
    assert protocol_differences(recorded, replayed) == [f"deviations: [] against [{inits!r}]"]


@settings(deadline=None)
@given(st.sets(st.integers(0, 89), min_size=1, max_size=12), st.integers(1, 50))
def test_every_task_and_init_exactly_once(tasks: set[int], count: int) -> None:
    protocol = get_protocol("openvla-oft")
    specs = build_specs(protocol, "libero_90", sorted(tasks), init_names(protocol, count, "test"))
    pairs = [(spec.task, spec.init_number) for spec in specs]
    assert pairs == [(task, k) for task in sorted(tasks) for k in range(count)]
    assert len({spec.key for spec in specs}) == len(specs)
    assert {spec.protocol.max_steps for spec in specs} == {400}


def test_sampled_inits_lie_in_the_range_of_their_split() -> None:
    protocol = get_protocol("sampled")
    for split in ("validation", "test"):
        specs = build_specs(protocol, "libero_object", [0], init_names(protocol, 3, split), split=split)
        assert [spec.init_number for spec in specs] == list(SPLITS[split][:3])


def test_what_a_protocol_cannot_give_is_refused() -> None:
    protocol = get_protocol("openvla-oft")
    with pytest.raises(ProtocolError, match="51 inits asked for, but each task has 50"):
        init_names(protocol, 51, "test")
    with pytest.raises(ProtocolError, match="split 'validation' needs the protocol 'sampled'"):
        init_names(protocol, 3, "validation")
    with pytest.raises(ProtocolError, match="task 3 is named twice"):
        build_specs(protocol, "libero_object", [3, 3], ["benchmark:0"])
