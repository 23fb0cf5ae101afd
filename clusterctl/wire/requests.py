"""What the launcher asks of the trainer: the options of each command, declared once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire.fields import Checked, Problem, setting

KINDS = ("cpu", "cuda", "npu")
TYPES = ("fp32", "bf16", "fp16")
MATRICES = (*TYPES, "int8")
SPLITS = ("train", "valid", "test", "all")
# Formats of weights that `checkpoint export` writes, and those that `checkpoint import` reads.
WRITTEN_FORMATS = (
    "hf",
    "megatron",
    "megatron-core",
    "deepspeed",
    "dcp",
    "mindspore",
    "mindspore-safetensors",
    "peft",
)
READ_FORMATS = (*WRITTEN_FORMATS, "glm", "oneflow")
# A launch that asks for tens of thousands of threads ends in a crash of OpenMP.
MOST_THREADS = 1024


@dataclass(frozen=True)
class NoOptions:
    """A command without options: its question comes on stdin."""


@dataclass(frozen=True, kw_only=True)
class Printed:
    """How a result is printed."""

    json: bool = setting(False)
    """Print one JSON document."""


@dataclass(frozen=True)
class Loading:
    """The model, and the device that computes it."""

    tokenizer: Path | None = setting(None, metavar="FILE")
    """The tokenizer. Default: the one in the checkpoint."""
    base: Path | None = setting(None, metavar="DIR")
    """The weights that adapters belong to, if they moved."""
    device: str = setting("", choices=("", *KINDS), metavar="KIND", example="one of cpu, cuda, npu")
    """Device: cpu, cuda or npu. Default: the nodes' kind; here the best available."""
    add_bos: bool | None = setting(None)
    """Begin prompts with bos_token. Default: as the tokenizer does."""


@dataclass(frozen=True)
class ModelOptions(Loading):
    """How a model is loaded."""

    weights: str = setting("", choices=("", *MATRICES), metavar="TYPE")
    """Store matrices as fp32, bf16, fp16 or int8. Default: fp32 on CPUs, else bf16 if possible."""
    cache: str | None = setting(None, metavar="SIZE")
    """Memory for keys and values, as in 4GiB. Default: 16 texts."""
    threads: int = setting(0, least=0, most=MOST_THREADS)
    """Compute with N threads; 0: one per core."""
    tensor: int = setting(0, least=0)
    """Divide every layer among N ranks. 0: as many as possible."""
    pipeline: int = setting(0, least=0)
    """Divide the sequence of layers among N ranks."""


@dataclass(frozen=True)
class DrawingOptions(Checked):
    """How tokens are chosen."""

    max_tokens: int = setting(64, least=1)
    """Generate at most N tokens; for a GLM, in each blank."""
    temperature: float = setting(0.8, least=0, most=100, metavar="T")
    """Higher: more varied text; 0: always the most likely token."""
    top_k: int = setting(40, least=0, metavar="K")
    """Choose among the K most likely tokens; 0: all."""
    top_p: float = setting(1.0, above=0, most=1, metavar="P")
    """Choose among the tokens that make up this probability."""
    min_p: float = setting(0.0, least=0, most=1, metavar="P")
    """Leave out tokens less likely than P times the most likely one."""
    repetition_penalty: float = setting(1.0, above=0, most=100, metavar="X")
    """Above 1: make tokens of the prompt and the text less likely."""
    presence_penalty: float = setting(0.0, least=-2, most=2, metavar="X")
    """Subtract X from the logits of tokens that the text has."""
    frequency_penalty: float = setting(0.0, least=-2, most=2, metavar="X")
    """Subtract X for each time that the text has the token."""
    no_repeat_ngram: int = setting(0, least=0)
    """Never repeat N tokens in a row."""
    beams: int = setting(1, least=1, most=64)
    """Search with N beams instead of drawing tokens, if N is above 1."""
    length_penalty: float = setting(1.0, least=-10, most=10, metavar="X")
    """With --beams: divide log probabilities by length^X."""
    stop: tuple[str, ...] = setting((), metavar="TEXT")
    """Stop before this text. Can be repeated."""
    logprobs: int | None = setting(None, least=0, most=100)
    """Report log probabilities and the N best tokens."""
    samples: int = setting(1, least=1, most=1000)
    """Generate N texts for each prompt, each with the next seed."""
    seed: int = setting(1234)
    """The same seed gives the same text."""
    ignore_end: bool = setting(False)
    """Do not stop at the end of a document."""
    truncate: bool = setting(False)
    """Shorten a prompt that is too long to its last tokens."""

    def problems(self) -> Iterator[Problem]:
        if not -(2**63) <= self.seed < 2**64:
            yield "seed", f"{self.seed} is out of range: a number of 64 bits", "leave it out"
        if len(self.stop) > 64 or not all(0 < len(text) <= 1000 for text in self.stop):
            given = json.dumps(self.stop, ensure_ascii=False)
            given = given if len(given) <= 100 else f"{given[:97]}..."
            yield (
                "stop",
                f"{given} is out of range: at most 64 texts of 1 to 1000 characters",
                "leave some out",
            )


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and its limits."""

    host: str = setting("127.0.0.1", metavar="ADDRESS")
    """Listen on this address; one that others reach needs --api-key-file."""
    port: int = setting(8000, least=0, most=65535)
    """Listen on this port; 0: a free one."""
    name: str = setting("", metavar="NAME")
    """The model's name. Default: the checkpoint's folder."""
    api_key_file: Path | None = setting(None, metavar="FILE")
    """A file with the key that clients must send."""
    chat_template: Path | None = setting(None, metavar="FILE")
    """A Jinja template for conversations. Default: the tokenizer's."""
    batch: int = setting(64, least=1)
    """Compute N texts at a time."""
    queue: int = setting(256, least=0)
    """Let N requests wait; more get status 429."""
    connections: int = setting(2048, least=1)
    """Keep at most N connections open."""
    max_body: int = setting(4 << 20, least=1024, metavar="BYTES")
    """Refuse requests with a larger body."""
    request_timeout: float = setting(600.0, least=0.1, most=1_000_000, metavar="SECONDS")
    """End an answer that takes longer."""
    drain: float = setting(30.0, least=0.1, most=1_000_000, metavar="SECONDS")
    """When stopped, wait this long for running answers."""


@dataclass(frozen=True)
class Scoring:
    """How the data are read and scored; these values identify an evaluation."""

    convention: str = setting("", metavar="NAME")
    """How to score, by the name of the other program; an unknown NAME lists them."""
    stride: int = setting(32, least=1)
    """Move the window by N tokens, for tasks with overlapping windows."""
    pattern: int = setting(0, least=0)
    """Use wording number N of a GLM's cloze question."""
    split: str = setting("all", choices=SPLITS, metavar="PART")
    """Part of a corpus: train, valid, test or all."""
    limit: int = setting(0, least=0)
    """Evaluate only the first N documents or examples; 0: all."""


@dataclass(frozen=True)
class ScoringOptions(Loading):
    """How the data are scored, and by which model on which device."""

    scoring: Scoring = Scoring()
    weights: str = setting("fp32", choices=TYPES, metavar="TYPE")
    """On GPUs and NPUs: fp32, bf16 or fp16."""


@dataclass(frozen=True)
class PromptOptions:
    """What a model continues."""

    prompt: tuple[str, ...] = setting((), short="-p", metavar="TEXT")
    """Text to continue; a GLM fills in [MASK], [sMASK] and [gMASK]. Can be repeated."""
    prompts: str | None = setting(None, metavar="FILE")
    """A file with a prompt per line, or JSON lines with `prompt`; '-' for stdin."""


@dataclass(frozen=True)
class TaskOptions:
    """What a model is evaluated on."""

    task: tuple[str, ...] = setting((), required=True, short="-t", metavar="TASK[=FILE]")
    """A task: ppl, lambada, wikitext, copa or choice. Can be repeated."""
    data: Path | None = setting(None, metavar="FILE")
    """The data of a task without =FILE."""


@dataclass(frozen=True, kw_only=True)
class OfCheckpoint:
    """Work with a model."""

    checkpoint: Path = setting(metavar="DIR")
    """The checkpoint."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(OfCheckpoint, Printed):
    """Prompts to continue."""

    model: ModelOptions = ModelOptions()
    drawing: DrawingOptions = DrawingOptions()
    given: PromptOptions = PromptOptions()
    prompt_line: tuple[str, ...] = setting((), metavar="LINE")
    """A prompt, as a line of the file."""


@dataclass(frozen=True, kw_only=True)
class ServeRequest(OfCheckpoint):
    """A model to serve."""

    model: ModelOptions = ModelOptions()
    server: ServerOptions = ServerOptions()


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(OfCheckpoint, Printed):
    """Tasks to evaluate a model on."""

    tasks: TaskOptions = TaskOptions()
    model: ScoringOptions = ScoringOptions()
    output: Path = setting(Path("evaluations"), metavar="DIR")
    """Where to write results."""
    batch_tokens: int = setting(4096, least=1)
    """Compute N tokens at a time."""


@dataclass(frozen=True)
class Converted:
    """What is read besides the weights."""

    state: bool = setting(False)
    """Convert the state of the optimizer too, if the format has it."""
    base: str = setting("", metavar="DIR")
    """The weights that the adapters belong to."""


@dataclass(frozen=True)
class ImportRequest(Converted):
    """What an import reads of another program's checkpoint."""

    heads: int = setting(0, least=0)
    """Attention heads, if SRC does not record them."""
    vocab: int = setting(0, least=0)
    """Tokens, if the table of SRC has padding."""


@dataclass(frozen=True)
class ExportRequest(Converted):
    """What an export writes of our checkpoint."""

    dtype: str = setting("fp32", choices=TYPES, metavar="TYPE")
    """The type of the weights: fp32, bf16 or fp16."""
    tensor: int = setting(1, least=1)
    """Megatron: divide each matrix into N files."""
    pipeline: int = setting(1, least=1)
    """Megatron: divide the layers into N stages."""


@dataclass(frozen=True, kw_only=True)
class NewWeights:
    """Where a conversion writes."""

    output: Path = setting(short="-o", metavar="DIR")
    """The folder to write; it must not exist."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(NewWeights):
    """The options of `checkpoint import`."""

    from_: str = setting("", choices=("", *READ_FORMATS), metavar="FORMAT")
    """The format of SRC. Default: detected from its files."""
    request: ImportRequest = ImportRequest()


@dataclass(frozen=True, kw_only=True)
class ExportOptions(NewWeights):
    """The options of `checkpoint export`."""

    to: str = setting(choices=WRITTEN_FORMATS, metavar="FORMAT")
    """The format to write: hf, megatron, mindspore, ..."""
    request: ExportRequest = ExportRequest()


@dataclass(frozen=True, kw_only=True)
class Conversion(Printed):
    """A checkpoint to convert."""

    source: Path = setting(positional=True)
    """The checkpoint."""
    dry_run: bool = setting(False)
    """Show what would happen; change nothing."""


@dataclass(frozen=True, kw_only=True)
class ConvertIn(Conversion):
    """Another program's checkpoint to convert to ours."""

    options: ImportOptions


@dataclass(frozen=True, kw_only=True)
class ConvertOut(Conversion):
    """A checkpoint of ours to convert."""

    options: ExportOptions


@dataclass(frozen=True, kw_only=True)
class WeightsRequest:
    """Weights whose model is described."""

    source: Path = setting(positional=True)
    """A folder with weights."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """A training."""

    config: Path = setting(positional=True)
    """The job's train part as JSON."""
    run_dir: Path | None = setting(None, metavar="DIR")
    """Where metrics and checkpoints go. Default: the folder of the config."""


@dataclass(frozen=True, kw_only=True)
class VerifyCheckpointRequest:
    """A checkpoint to compare with its manifest."""

    folder: Path = setting(positional=True)
    """The checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TensorboardOptions:
    """Where files of TensorBoard are written."""

    output: Path | None = setting(None, short="-o", metavar="DIR")
    """Where to write. Default: tensorboard/ in the folder of the run."""


@dataclass(frozen=True, kw_only=True)
class TensorboardRequest(TensorboardOptions):
    """Metrics to write as files of TensorBoard."""

    run: Path = setting(positional=True)
    """The folder of a run, or its file with metrics."""


@dataclass(frozen=True)
class DiffQuestion:
    """Two checkpoints to compare, by pairs of their files."""

    first: Path
    second: Path
    pairs: tuple[tuple[str, str], ...]
