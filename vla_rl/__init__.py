"""vla-rl: post-train vision-language-action policies for robots.

Importing the package imports nothing heavy: no torch, no simulator.
"""

__version__ = "0.1.0"
