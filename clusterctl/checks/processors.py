"""Compare the processors of the nodes: different instruction sets round differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterctl.checks.answers import NodeAnswers, Processor
from clusterctl.finding import Finding
from clusterctl.inventory import nodeset

AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# Instruction sets that ops in bf16 and 8 bits use if the processor has them.
NARROW = ("avx512_bf16", "avx512_vnni")


def findings(answers: Sequence[NodeAnswers]) -> Iterator[Finding]:
    """Yield a finding if ranks on these nodes would compute with different instructions.

    It is a warning for a training on CPUs, and a note where the devices are NPUs or GPUs.
    """
    groups: dict[str, list[str]] = {}
    for answer in answers:
        if answer.found.processor.machine:
            groups.setdefault(level(answer.found.processor), []).append(answer.node.name)
    if len(groups) < 2:
        return
    parts = [f"{name} on {nodeset.fold(nodes)}" for name, nodes in groups.items()]
    text = (
        f"ops on a CPU would use different instructions: {', '.join(parts)}; losses differ in the last digits"
    )
    on_cpus = any(answer.node.kind == "cpu" for answer in answers)
    yield Finding("warning" if on_cpus else "note", "all nodes", text, _remedy(answers), "instructions")


def level(processor: Processor) -> str:
    """Return the instruction set that the ops choose on a processor, with those for bf16 and 8 bits."""
    own = set(processor.instructions)
    if processor.machine != "x86_64":
        return processor.machine
    if not own >= AVX512:
        return "AVX2" if own >= AVX2 else "baseline"
    # The ops choose some products by the maker, because their speed differs.
    maker = f"{processor.maker}'s " if processor.maker else ""
    return f"{maker}AVX-512" + "".join(
        f" with {name.removeprefix('avx512_')}" for name in NARROW if name in own
    )


def _remedy(answers: Sequence[NodeAnswers]) -> str:
    processors = [answer.found.processor for answer in answers]
    if any(processor.machine != "x86_64" for processor in processors):
        return "run on nodes with equal processors"
    lowest = "AVX2" if all(set(processor.instructions) >= AVX2 for processor in processors) else "baseline"
    return f"`env: {{CLUSTERCTL_NATIVE_LEVEL: {lowest}}}` in the job makes all ranks use the same"
