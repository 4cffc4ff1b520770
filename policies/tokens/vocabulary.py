"""Where text, marks and action tokens lie in the one vocabulary of the language model.

    0 ... text        text + 0 ... text + 3        text + 4 ...
    text tokens       END_THINK THINK ACT END_ACT  action tokens  spare rows

Policies that write no text and a fixed number of actions may have no marks (OpenVLA). The mark that ends a segment lies beside the
tokens of the segment: what may be chosen at a position is one range.
"""

from __future__ import annotations

from dataclasses import dataclass

MARKS = 4
"""Tokens that open and close the reasoning and the actions."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a policy."""

    text: int
    """Number of text tokens."""
    actions: int
    """Number of action tokens."""
    marks: int = MARKS
    """`MARKS`, or 0."""
    spare: int = 0
    """Rows after the action tokens, which are never written."""

    @property
    def end_think(self) -> int:
        """Closes the reasoning."""
        return self.text

    @property
    def think(self) -> int:
        """Opens the reasoning."""
        return self.text + 1

    @property
    def act(self) -> int:
        """Opens the actions, where they are decoded one after the other."""
        return self.text + 2

    @property
    def end_act(self) -> int:
        """Closes the actions, where their number varies."""
        return self.text + 3

    @property
    def first_action(self) -> int:
        """Id of action token 0."""
        return self.text + self.marks

    @property
    def size(self) -> int:
        """All ids."""
        return self.first_action + self.actions + self.spare

    @property
    def reasoning_choices(self) -> range:
        """What may be written in the reasoning: text, and its end."""
        return range(self.end_think + 1)

    def action_choices(self, fixed_length: bool) -> range:
        """What may be written as actions: action tokens, and their end where their number varies."""
        return range(self.first_action if fixed_length else self.end_act, self.first_action + self.actions)
