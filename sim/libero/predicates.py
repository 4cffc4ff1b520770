"""Success with ids that are looked up once, equal to LIBERO's `_check_success`.

LIBERO loops over contacts and compares geom names for each predicate; here a clause becomes a function of the arrays.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vla_rl.episode import SpecError
from vla_rl.sim.libero.scene import Scene

Predicate = Callable[[], bool]


def compile_goal(scene: Scene, clauses: Sequence[Sequence[str]]) -> Predicate:
    """A function that tells whether all clauses hold now. Raises SpecError for names or predicates that the scene has not."""
    compiled = [compile_clause(scene, clause) for clause in clauses]

    def holds() -> bool:
        results = [clause() for clause in compiled]  # all of them, as LIBERO does: testing a knob sets its burner
        return all(results)

    return holds


def compile_clause(scene: Scene, clause: Sequence[str]) -> Predicate:
    """One clause such as `["in", "milk_1", "basket_1_contain_region"]`."""
    states = [_object_state(scene, clause, name) for name in clause[1:]]
    kind = clause[0]
    if kind == "on":
        first, second = states
        return _on_site(scene, second, first) if second.object_state_type == "site" else _on_object(scene, second, first)
    if kind == "in" and states[1].object_state_type == "site":
        return _in_site(scene, states[1], states[0])
    if kind in ("open", "close", "turnon", "turnoff"):
        return _joint_condition(scene, states[0], kind, clause)
    raise SpecError(f"goal clause {list(clause)} is nothing that LIBERO can evaluate in {scene.task.name}")


def _object_state(scene: Scene, clause: Sequence[str], name: str) -> Any:
    known = scene.env.object_states_dict
    if name not in known:
        nearest = difflib.get_close_matches(name, list(known), 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise SpecError(f"goal clause {list(clause)} names {name!r}, which {scene.task.name} has not; it has {', '.join(known)}{hint}")
    return known[name]


def _body(scene: Scene, state: Any) -> int:
    return int(scene.env.obj_body_id[state.object_name])


def _contact_geoms(scene: Scene, object_name: str) -> np.ndarray:
    """bool[ngeom]: geoms that count as touching the object."""
    names = set(scene.env.get_object(object_name).contact_geoms)
    model = scene.env.sim.model
    return np.array([model.geom_id2name(geom) in names for geom in range(scene.model.ngeom)])


def _touching(scene: Scene, first: np.ndarray, second: np.ndarray) -> bool:
    pairs = scene.data.contact.geom[: scene.data.ncon]
    left, right = pairs[:, 0], pairs[:, 1]
    return bool(np.any((first[left] & second[right]) | (first[right] & second[left])))


def _on_object(scene: Scene, below: Any, above: Any) -> Predicate:
    below_body, above_body = _body(scene, below), _body(scene, above)
    below_geoms, above_geoms = _contact_geoms(scene, below.object_name), _contact_geoms(scene, above.object_name)

    def holds() -> bool:
        lower, upper = scene.data.xpos[below_body], scene.data.xpos[above_body]
        if not lower[2] <= upper[2] or not np.linalg.norm(lower[:2] - upper[:2]) < 0.03:
            return False
        return _touching(scene, below_geoms, above_geoms)

    return holds


def _on_site(scene: Scene, site_state: Any, above: Any) -> Predicate:
    site = scene.env.object_sites_dict[site_state.object_name]
    if not hasattr(site, "under"):
        return lambda: True
    site_id = scene.env.sim.model.site_name2id(site_state.object_name)
    body = _body(scene, above)
    parent = scene.env.get_object(site_state.parent_name)
    parent_geoms = _contact_geoms(scene, site_state.parent_name) if parent is not None else None
    above_geoms = _contact_geoms(scene, above.object_name)

    def holds() -> bool:
        data = scene.data
        if not site.under(data.site_xpos[site_id], data.site_xmat[site_id].reshape((3, 3)), data.xpos[body]):
            return False
        return parent_geoms is None or _touching(scene, parent_geoms, above_geoms)

    return holds


def _in_site(scene: Scene, site_state: Any, inside: Any) -> Predicate:
    site = scene.env.object_sites_dict[site_state.object_name]
    site_id = scene.env.sim.model.site_name2id(site_state.object_name)
    body = _body(scene, inside)

    def holds() -> bool:
        data = scene.data
        return bool(site.in_box(data.site_xpos[site_id], data.site_xmat[site_id].reshape((3, 3)), data.xpos[body]))

    return holds


def _joint_condition(scene: Scene, state: Any, kind: str, clause: Sequence[str]) -> Predicate:
    """`open` and `turnon` hold when any joint is past its range, `close` and `turnoff` when all are.

    The loops stop early as LIBERO's do: testing a stove's knob also sets what its burner shows.
    """
    owner, joints = scene.env.get_object(state.object_name), None
    if state.object_state_type == "site":
        owner, joints = scene.env.get_object(state.parent_name), scene.env.object_sites_dict[state.object_name].joints
    test = getattr(owner, {"open": "is_open", "close": "is_close", "turnon": "turn_on", "turnoff": "turn_off"}[kind], None)
    if test is None:
        raise SpecError(f"goal clause {list(clause)}: {clause[1]!r} cannot be {kind}")
    addresses = [int(scene.env.sim.model.get_joint_qpos_addr(joint)) for joint in (owner.joints if joints is None else joints)]
    combine = any if kind in ("open", "turnon") else all
    return lambda: combine(test(scene.data.qpos[address]) for address in addresses)
