"""The `tune:` part of a training: a task to learn instead of a corpus. Loads no NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.config.lora import LoraConfig
from trainer.config.reader import setting

CLOZE = ("copa", "choice")


@dataclass(frozen=True)
class TuneConfig:
    """A task with labelled examples."""

    task: str = setting("", choices=("", *CLOZE, "chat", "dpo", "classify"))
    """copa: SuperGLUE's COPA as GLM's cloze questions; choice: a text with one [MASK] and several answers; chat:
    conversations, of which the answers are learned; dpo: pairs of a better and a worse answer; classify: texts with
    labels."""
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
    template: str = setting("")
    """With chat and dpo: a file with a jinja template; by default the one that belongs to the tokenizer."""
    packing: bool = setting(False)
    """With chat: fill rows of model.sequence tokens with several examples, which do not see each other. By default a
    micro-batch is one row of its examples without padding."""
    beta: float = setting(0.1, above=0.0)
    """With dpo: how strongly the model is held to the reference, which is the model that the training begins with."""
    labels: tuple[str, ...] = setting(())
    """With classify: all labels."""
    fields: tuple[str, ...] = setting(("text",))
    """With classify: the fields of a line whose texts are read, one after the other."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Learn adapters of low rank, and leave the weights as they are."""
    too_long: str = setting("refuse", choices=("refuse", "cut", "leave_out"))
    """With chat, dpo and classify: what happens to an example of more than model.sequence tokens."""

    @property
    def rows(self) -> int:
        """Return the rows that the model computes for a sample: one per answer; 4 where their number varies."""
        return {"copa": 2, "dpo": 2, "choice": 4}.get(self.task, 1)
