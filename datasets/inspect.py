"""`vla-rl data inspect`: what a dataset holds, as a summary in the terminal and as one HTML page with pictures.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.episodes import load_episode, load_steps
from vla_rl.datasets.files import write_bytes
from vla_rl.datasets.lerobot_read import LeRobotInfo
from vla_rl.datasets.png import encode_png
from vla_rl.datasets.schema import reorient
from vla_rl.datasets.store import list_episodes, require_some
from vla_rl.episode import VIEWS, Float32, UInt8

ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
THUMBNAILS = 48
"""Episodes that the page shows pictures of, spread over the dataset."""
BINS = 41


@dataclass(frozen=True)
class Overview:
    """The numbers of a dataset."""

    paths: tuple[str, ...]
    infos: tuple[EpisodeInfo, ...]
    actions_RA: Float32
    """Executed actions of all episodes."""
    size_bytes: int
    """On disk."""

    @property
    def lengths(self) -> list[int]:
        """Control steps of each episode."""
        return [info.num_steps for info in self.infos]


def overview(paths: Sequence[str | Path]) -> Overview:
    """Read everything but pictures. Raises DatasetError."""
    infos = tuple(list_episodes(paths))
    require_some(infos)
    actions_RA = np.concatenate([load_steps(info, labels=False)[0] for info in infos])
    return Overview(tuple(map(str, paths)), infos, actions_RA, _size(infos))


def _size(infos: Sequence[EpisodeInfo]) -> int:
    folders = {info.path for info in infos if isinstance(info, LeRobotInfo)}
    files = {info.path for info in infos} - folders
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()) + sum(
        path.stat().st_size for path in files
    )


def summary(view: Overview) -> str:
    """For the terminal."""
    lengths, first = view.lengths, view.infos[0]
    outcomes = Counter(info.outcome.value for info in view.infos)
    pictures = sum(info.num_frames for info in view.infos)
    dense = "before every step" if first.frame_every == 1 else f"before every {first.frame_every}. step"
    conventions = first.conventions.to_dict()
    lines = [
        f"{len(view.infos)} episodes ({', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}), "
        f"{sum(lengths)} control steps ({min(lengths)} to {max(lengths)}, median {int(np.median(lengths))})",
        f"{pictures} pictures of {first.resolution} px from each of {len(VIEWS)} views, {dense}; {view.size_bytes / 2**20:.1f} MiB",
        f"format {'LeRobot (' + first.layout.name + ')' if isinstance(first, LeRobotInfo) else 'HDF5'}; "
        + ", ".join(f"{name} {value}" for name, value in conventions.items()),
    ]
    lines += [f"  {task:<28} {count:>5} episodes  {prompt}" for (task, prompt), count in sorted(_tasks(view).items())]
    return "\n".join(lines)


def _tasks(view: Overview) -> Counter[tuple[str, str]]:
    return Counter((f"{info.spec.suite}:{info.spec.task}", info.prompt) for info in view.infos)


def write_page(view: Overview, path: Path) -> Path:
    """Write the HTML page: self-contained, pictures inside. Returns `path`."""
    chosen = np.unique(np.linspace(0, len(view.infos) - 1, min(THUMBNAILS, len(view.infos))).astype(int)).tolist()
    parts = [
        f"<h1>{html.escape(', '.join(view.paths))}</h1><pre>{html.escape(summary(view))}</pre>",
        f"<h2>Episode lengths</h2>{_bars(*np.histogram(view.lengths, bins=BINS), 'control steps')}",
        "<h2>Actions</h2><div class=grid>"
        + "".join(_histogram(view.actions_RA[:, i], name) for i, name in enumerate(ACTION_NAMES))
        + "</div>",
        f"<h2>Episodes</h2><p>{len(chosen)} of {len(view.infos)}: the first, a middle and the last picture of both views.</p>",
        "<div class=episodes>" + "".join(_card(number, view.infos[number]) for number in chosen) + "</div>",
    ]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dataset</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>"
    )
    write_bytes(path, page.encode())
    return path


def _histogram(values_R: np.ndarray, name: str) -> str:
    counts, edges = np.histogram(values_R, bins=BINS, range=(min(-1.0, float(values_R.min())), max(1.0, float(values_R.max()))))
    return f"<figure>{_bars(counts, edges, name)}</figure>"


def _bars(counts: np.ndarray, edges: np.ndarray, label: str) -> str:
    """A histogram as SVG."""
    width, height = 8 * len(counts), 90
    tallest = max(1, int(counts.max()))
    bars = "".join(
        f"<rect x={8 * i} y={height - height * count / tallest:.1f} width=7 height={height * count / tallest:.1f}>"
        f"<title>{low:.3g} to {high:.3g}: {count}</title></rect>"
        for i, (count, low, high) in enumerate(zip(counts.tolist(), edges[:-1], edges[1:]))
    )
    text = f"<text x=0 y={height + 14}>{edges[0]:.3g}</text><text x={width} y={height + 14} text-anchor=end>{edges[-1]:.3g}</text>"
    middle = f"<text x={width / 2} y={height + 14} text-anchor=middle class=label>{html.escape(label)} (tallest: {tallest})</text>"
    return f"<svg viewBox='0 0 {width} {height + 18}' role=img aria-label='{html.escape(label)}'>{bars}{text}{middle}</svg>"


def _card(number: int, info: EpisodeInfo) -> str:
    episode = load_episode(info)
    frames = sorted(episode.frames().items())
    shown = [frames[i] for i in sorted({0, len(frames) // 2, len(frames) - 1})]
    pictures = "".join(
        f"<img alt='{view} at step {t}' title='{view} before step {t}' src='{_embedded(frame.images[view], info)}'>"
        for view in VIEWS
        for t, frame in shown
        if view in frame.images
    )
    person = sum(int(step.intervention_E.sum()) for step in episode.steps)
    note = f", {person} by a person" if person else ""
    caption = f"<b>{number}</b> {html.escape(info.prompt)}<br>{html.escape(info.spec.key)} · {info.num_steps} steps{note}"
    return f"<article class={info.outcome.value}>{pictures}<p>{caption} · <em>{info.outcome.value}</em></p></article>"


def _embedded(picture_HWC: UInt8, info: EpisodeInfo) -> str:
    """The picture as it was observed by the policy, but turned upright for people."""
    upright = reorient(picture_HWC, info.conventions.orientation)[::-1]
    return "data:image/png;base64," + base64.b64encode(encode_png(upright)).decode()


STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1d2433, #e6e9ef); --soft: light-dark(#667085, #98a2b3);
  --card: light-dark(#fff, #1c2230); --page: light-dark(#f5f6f8, #12161f); --bar: #4c78a8; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1200px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
pre { background: var(--card); padding: 1rem; border-radius: 8px; overflow-x: auto; }
svg { width: 100%; max-width: 420px; height: auto; } rect { fill: var(--bar); } text { font-size: 11px; fill: var(--soft); }
.label { font-weight: 600; } figure { margin: 0; }
.grid, .episodes { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem; }
article { background: var(--card); border-radius: 8px; padding: .6rem; border-left: 4px solid #2e9e5b; font-size: .85rem;
  overflow-wrap: anywhere; }
article.failure, article.crash { border-color: #d64545; } article.discarded { border-color: var(--soft); }
article img { width: 32.5%; image-rendering: pixelated; border-radius: 3px; }
article p { margin: .4rem 0 0; } em { color: var(--soft); font-style: normal; }
"""
