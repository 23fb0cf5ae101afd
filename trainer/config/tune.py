"""The `tune:` part of a training: a task to learn instead of a corpus. Loads no NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field

from clusterctl.wire.fields import setting
from trainer.config.lora import LoraConfig

CLOZE = ("copa", "choice")


@dataclass(frozen=True)
class TuneConfig:
    """A fine-tuning task and its examples."""

    task: str = setting("", choices=("", *CLOZE, "chat", "dpo", "classify"))
    """copa: SuperGLUE's COPA as GLM's cloze questions; choice: a text with one [MASK] and several answers; chat:
    conversations, of which the answers are learned; dpo: pairs of a better and a worse answer; classify: texts with
    labels."""
    train: str = setting("")
    """JSON-lines file with the training examples."""
    valid: str = setting("")
    """JSON-lines file with examples for the accuracy after each epoch."""
    epochs: int = setting(1, least=1)
    """Number of passes over the examples; if `steps` is left out, it is computed from this."""
    pattern: int = setting(0, least=0)
    """The wording of COPA's questions: 0 with quotation marks around the choices, 1 without."""
    mirror: bool = setting(True)
    """Learn each COPA question a second time with its choices exchanged."""
    patience: int = setting(0, least=0)
    """Stop after this many evaluations without an improvement; 0: never."""
    template: str = setting("")
    """With chat and dpo: a file with a Jinja template. Default: the tokenizer's template."""
    packing: bool = setting(False)
    """With chat: fill rows of model.sequence tokens with several examples, which do not see each other. By default a
    micro-batch is one row of its examples without padding."""
    beta: float = setting(0.1, above=0.0)
    """With dpo: how strongly the model is kept close to the reference model, the model with its initial weights."""
    labels: tuple[str, ...] = setting(())
    """With classify: all labels."""
    fields: tuple[str, ...] = setting(("text",))
    """With classify: the fields of a line whose texts are joined."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Learn low-rank adapters (LoRA) instead of changing the weights."""
    too_long: str = setting("refuse", choices=("refuse", "cut", "leave_out"))
    """With chat, dpo and classify: what happens to an example of more than model.sequence tokens."""

    @property
    def rows(self) -> int:
        """Return the rows that the model computes for a sample: one per answer; 4 if their number varies."""
        return {"copa": 2, "dpo": 2, "choice": 4}.get(self.task, 1)
