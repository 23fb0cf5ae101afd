"""The `tune:` part of a training: a task to learn instead of a corpus. Loads no NumPy."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.reader import setting


@dataclass(frozen=True)
class TuneConfig:
    """A task with labelled examples."""

    task: str = setting("", choices=("", "copa", "choice"))
    """copa: SuperGLUE's COPA as GLM's cloze questions; choice: a text with one [MASK] and several answers."""
    train: str = setting("")
    """JSON lines to learn from."""
    valid: str = setting("")
    """JSON lines to measure the accuracy on, after each epoch."""
    epochs: int = setting(1, least=1)
    """How often every example is learned from; `steps` follows from it if left out."""
    pattern: int = setting(0, least=0)
    """The wording of COPA's questions: 0 with quotation marks around the choices, 1 without."""
    mirror: bool = setting(True)
    """Learn each COPA question a second time with its choices exchanged."""
    patience: int = setting(0, least=0)
    """Stop after so many evaluations without a better accuracy; 0: never."""

    @property
    def rows(self) -> int:
        """Return the rows that the model computes for a sample: one per answer; 4 where their number varies."""
        return {"copa": 2, "choice": 4}.get(self.task, 1)
