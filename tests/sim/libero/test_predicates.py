"""Compiled predicates equal LIBERO's own `_eval_predicate`, on scattered scenes where both answers occur."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from vla_rl.episode import EpisodeSpec
from vla_rl.sim.base import Look
from vla_rl.sim.libero.env import LiberoEnv
from vla_rl.sim.libero.predicates import compile_clause, compile_goal
from vla_rl.sim.libero.scene import Scene

SCENES = 150


def scatter(scene: Scene, rng: np.random.Generator) -> None:
    """Drop one object onto, into or beside another thing, and turn every knob and drawer somewhere."""
    env, data = scene.env, scene.data
    names = list(env.objects_dict)
    moved, target = rng.choice(names), rng.choice([*env.object_sites_dict, *names])
    site = target in env.object_sites_dict
    goal = data.site_xpos[env.sim.model.site_name2id(target)] if site else data.xpos[env.obj_body_id[target]]
    pose = data.qpos[slice(*env.sim.model.get_joint_qpos_addr(env.objects_dict[moved].joints[-1]))]
    pose[:3] = goal + rng.normal(0, [0.02, 0.02, 0.03])
    for fixture in env.fixtures_dict.values():
        for joint in fixture.joints:
            address = env.sim.model.get_joint_qpos_addr(joint)
            low, high = scene.model.jnt_range[env.sim.model.joint_name2id(joint)]
            data.qpos[address] = rng.choice([low, high, 0.0, rng.uniform(low, high), rng.uniform(-1e-6, 1e-6)])
    mujoco.mj_forward(scene.model, data)


@pytest.mark.parametrize(("suite", "task"), [("libero_object", 0), ("libero_goal", 7)])
def test_equal_to_liberos(env: LiberoEnv, suite: str, task: int) -> None:
    spec = EpisodeSpec(suite, task, "benchmark:0", "test")
    env.reset(spec, Look())
    assert env._run is not None
    scene = env._run.parts.scene
    objects, sites = list(scene.env.objects_dict), list(scene.env.object_sites_dict)
    clauses = [[kind, first, second] for kind in ("on", "in") for first in objects for second in sites]
    clauses += [["on", first, second] for first in objects for second in objects if first != second]
    clauses += [[kind, site] for kind in ("open", "close") for site in sites if site.startswith("wooden_cabinet") and "side" not in site]
    clauses += [[kind, name] for kind in ("turnon", "turnoff") for name in scene.env.fixtures_dict if "stove" in name]
    compiled = [compile_clause(scene, clause) for clause in clauses]
    rng = np.random.default_rng(0)
    answers = {kind: set[bool]() for kind, *_ in clauses}
    for number in range(SCENES):
        if number % 10 == 0:
            env.reset(spec, Look())
        scatter(scene, rng)
        for clause, ours in zip(clauses, compiled, strict=True):
            theirs = bool(scene.env._eval_predicate(clause))
            assert ours() == theirs, f"scene {number}: {clause}"
            answers[clause[0]].add(theirs)
    assert all(found == {True, False} for found in answers.values()), answers


def test_a_goal_is_a_conjunction(env: LiberoEnv) -> None:
    env.reset(EpisodeSpec("libero_object", 0, "benchmark:0", "test"), Look())
    assert env._run is not None
    scene = env._run.parts.scene
    holds, fails = ["on", "milk_1", "floor_other_object_region_2"], ["in", "milk_1", "basket_1_contain_region"]
    assert compile_goal(scene, [holds])()
    assert not compile_goal(scene, [holds, fails])() and not compile_goal(scene, [fails])()
