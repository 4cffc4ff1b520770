"""The scene of Reach: a table, a gantry-driven gripper and coloured blocks, all MuJoCo primitives.

Everything that an episode changes is in `qpos`, also which blocks stand on the table, so that a simulator state says
it all. Lengths in metres; z is up; the table's surface is z = 0.
"""
# mujoco is compiled and has no type stubs:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import mujoco

from vla_rl.sim.reach_layout import BLOCK_HALF, COLOURS, Layout

_RGBA = {"red": "0.9 0.1 0.1 1", "green": "0.1 0.8 0.1 1", "blue": "0.1 0.2 0.9 1", "yellow": "0.9 0.8 0.1 1"}
_PARKED = 5.0
"""Blocks that an episode does not use stand at this x, behind every camera."""


def build_model(resolution: int) -> mujoco.MjModel:
    """Compile the scene for pictures of `resolution` pixels."""
    return mujoco.MjModel.from_xml_string(_SCENE.format(resolution=resolution, blocks="".join(map(_block, COLOURS))))


def put_up(model: mujoco.MjModel, data: mujoco.MjData, layout: Layout) -> None:
    """Bring `data` to the start of an episode, whatever happened before."""
    mujoco.mj_resetData(model, data)
    for index, joint in enumerate(("tip_x", "tip_y", "tip_z")):
        data.joint(joint).qpos[0] = layout.tip[index]
    for colour in COLOURS:
        x, y = layout.blocks.get(colour, (_PARKED, 0.0))
        data.joint(f"{colour}_x").qpos[0] = x
        data.joint(f"{colour}_y").qpos[0] = y
    mujoco.mj_forward(model, data)


def _block(colour: str) -> str:
    return f"""
    <body name="{colour}_block" pos="0 0 {BLOCK_HALF}">
      <joint name="{colour}_x" type="slide" axis="1 0 0" damping="10"/>
      <joint name="{colour}_y" type="slide" axis="0 1 0" damping="10"/>
      <geom type="box" size="{BLOCK_HALF} {BLOCK_HALF} {BLOCK_HALF}" mass="0.1" rgba="{_RGBA[colour]}"/>
    </body>"""


_SCENE = """
<mujoco model="reach">
  <option timestep="0.005" gravity="0 0 0" integrator="implicitfast">
    <flag contact="disable"/>
  </option>
  <visual>
    <global offwidth="{resolution}" offheight="{resolution}"/>
    <quality shadowsize="0" offsamples="0" numslices="8" numstacks="6"/>
    <headlight ambient="0.5 0.5 0.5" diffuse="0.5 0.5 0.5" specular="0 0 0"/>
  </visual>
  <worldbody>
    <camera name="image" pos="0.42 0 0.48" xyaxes="0 1 0 -0.75 0 0.66" fovy="45"/>
    <geom name="table" type="box" pos="0 0 -0.01" size="0.24 0.24 0.01" rgba="0.62 0.58 0.52 1"/>
    <body name="gripper">
      <joint name="tip_x" type="slide" axis="1 0 0"/>
      <joint name="tip_y" type="slide" axis="0 1 0"/>
      <joint name="tip_z" type="slide" axis="0 0 1"/>
      <camera name="image2" pos="-0.06 0 0.16" xyaxes="0 -1 0 0.94 0 0.34" fovy="75"/>
      <site name="tip" pos="0 0 0"/>
      <geom name="palm" type="box" pos="0 0 0.05" size="0.01 0.026 0.008" mass="1" rgba="0.25 0.25 0.28 1"/>
      <body name="left" pos="0 0 0.02">
        <joint name="finger_left" type="slide" axis="0 1 0"/>
        <geom type="box" size="0.008 0.004 0.02" mass="0.05" rgba="0.25 0.25 0.28 1"/>
      </body>
      <body name="right" pos="0 0 0.02">
        <joint name="finger_right" type="slide" axis="0 1 0"/>
        <geom type="box" size="0.008 0.004 0.02" mass="0.05" rgba="0.25 0.25 0.28 1"/>
      </body>
    </body>{blocks}
  </worldbody>
  <actuator>
    <position joint="tip_x" kp="3000" kv="90"/>
    <position joint="tip_y" kp="3000" kv="90"/>
    <position joint="tip_z" kp="3000" kv="90"/>
    <position joint="finger_left" kp="100" kv="5"/>
    <position joint="finger_right" kp="100" kv="5"/>
  </actuator>
</mujoco>
"""
