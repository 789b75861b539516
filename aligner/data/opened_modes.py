"""Modes in which templates open answers: with thoughts or without."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.errors import DataError


@dataclass
class OpenedModes:
    """Counts of conversations whose answers open as the run's prompts do, and of the others by their mode."""

    own: int = 0
    others: dict[str, int] = field(default_factory=dict)  # by the argument

    def count(self, own: bool, thinks: bool) -> None:
        mode = f"enable_thinking: {str(thinks).lower()}"
        self.own += own
        if not own:
            self.others[mode] = self.others.get(mode, 0) + 1

    def notes(self, key: str) -> list[str]:
        """Return notes on the others. Raises DataError if all of a training file are: later prompts would open in the
        untrained mode. Of several sources another one may have that mode."""
        if self.others and not self.own and key.endswith(".train"):
            mode, number = next(iter(self.others.items()))
            raise DataError(
                f"{key}: expected a conversation whose responses open as prompts do, found none among {number}: they "
                f"open with {mode}. Fix: data.template_arguments={{{mode}}}, also in later stages"
            )
        return [
            f"{number} conversations have responses that open with {mode}, unlike prompts of this run "
            "(data.template_arguments)"
            for mode, number in self.others.items()
        ]
