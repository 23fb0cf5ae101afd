"""Fill in the options that a launcher's command leaves open, and report those that contradict the nodes of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path, PurePath

from clusterctl.jobs.launchers import options
from clusterctl.jobs.launchers.known import MPI, TORCH_MODULES, Launcher, flags
from clusterctl.jobs.launchers.options import Option, Shape
from clusterctl.jobs.launchers.reader import Use, uses

# What a script writes for an option's value that differs between nodes.
SPELLED = {
    "--node_rank": "$NODE_RANK", "--machine_rank": "$NODE_RANK", "--rank": "$NODE_RANK",
    "--hostfile": "$CLUSTERCTL_HOSTFILE", "--master_addr": "$MASTER_ADDR", "--main_process_ip": "$MASTER_ADDR",
    "--master_port": "$MASTER_PORT", "--main_process_port": "$MASTER_PORT", "--base_rank": "$FIRST_RANK",
    "--log_dir": "$CLUSTERCTL_RUN_DIR/launcher",
}  # fmt: skip
# Options whose absence hurts on no node.
DISPENSABLE = (
    "--mixed_precision",
    "--dynamo_backend",
    "--log_dir",
    "--tee",
    "--join",
    "--block",
    "--multi_gpu",
)
DEEPSPEED_FILTERS = ("--include", "-i", "--exclude", "-e")


@dataclass(frozen=True)
class Problem:
    """A problem of a command, with its remedy."""

    text: str
    remedy: str


def direct(command: Sequence[str]) -> Use | None:
    """Return the launcher whose words stand in the command itself; None if it starts none, or only in a script."""
    return next((use for use in uses(command) if not use.where), None)


def program_of(command: Sequence[str]) -> str:
    """Return the program that a launcher's command starts; "" for any other command."""
    use = direct(command)
    if use is None:
        return ""
    rest = [word for word in use.words[_program(use) :] if not word.startswith("-")]
    return next((word for word in rest if not PurePath(word).name.startswith("python")), "")


def completed(command: Sequence[str], shape: Shape) -> list[str]:
    """Return a launcher's command with the options that it leaves open."""
    use = direct(command)
    if use is None:
        return list(command)
    name = list(use.words[: use.launcher.words])
    if command[0] == "torchrun":
        # The node's Python has this module wherever torch is; the script may be missing, or be another Python's.
        name = ["python", "-m", TORCH_MODULES[0]]
    return [*command[: use.before], *name, *_missing(use, shape), *use.words[use.launcher.words :]]


def additions(command: Sequence[str], shape: Shape) -> list[str]:
    """Return the options that are filled in."""
    use = direct(command)
    return _missing(use, shape) if use else []


def starts_mpi(command: Sequence[str], code: Path | None) -> bool:
    """Return whether a command starts ranks by an MPI's launcher."""
    return any(use.launcher.name in MPI for use in uses(command, code))


def group_sizes(command: Sequence[str], code: Path | None, shape: Shape) -> set[int] | None:
    """Return how many ranks the groups of a command's launchers may have; None if a launcher decides while it runs."""
    sizes = set()
    for use in uses(command, code, variables(shape)):
        given = given_options(use)
        if ":" in given.get("--nnodes", ""):
            return None
        number = next((given[name] for name in ("-np", "-n", "--np") if name in given), "")
        is_chosen = use.launcher.options is options.mpi and number.isdecimal()
        sizes.add(int(number) if is_chosen else shape.world)
    return sizes or {shape.world}


def _missing(use: Use, shape: Shape) -> list[str]:
    return [word for option in _open(use, shape) for word in option.words]


def _open(use: Use, shape: Shape) -> list[Option]:
    """Return the options that a launcher needs and its command leaves open."""
    given = given_options(use)
    wanted = [option for option in use.launcher.options(shape, given) if option.fill]
    return [option for option in wanted if not any(name in given for name in option.names)]


def problems(command: Sequence[str], code: Path | None, shape: Shape) -> Iterator[Problem]:
    """Yield what is wrong with the launchers of a command, also in scripts of the pushed folder, on these nodes."""
    for use in uses(command, code, variables(shape)):
        prefix = f"{use.where}: " if use.where else ""
        found = [*_problems(use, shape), *_accelerate_problems(use, code, shape)]
        for problem in found:
            yield Problem(prefix + problem.text, problem.remedy)


def _problems(use: Use, shape: Shape) -> Iterator[Problem]:
    launcher, given = use.launcher, given_options(use)
    name = " ".join(use.words[: launcher.words])
    if shape.nodes > 1 and (problem := _own_way(use, name)):
        yield problem
        return
    if not use.where and launcher.name != "srun" and _starts_nothing(use, shape):
        yield Problem(f"{name} is given no program to start", f"write it at the end: {name} train.py")
    if launcher.options is options.torchrun and "--standalone" in given and shape.nodes > 1:
        yield Problem(
            f"{launcher.name} --standalone is for one node, and the run has {shape.nodes}",
            "leave out --standalone: the first node's address is filled in",
        )
    if launcher.name in MPI and shape.nodes > 1 and (chosen := set(options.MPI_HOSTS) & given.keys()):
        yield Problem(
            f"{name} {min(chosen)} {given[min(chosen)]} chooses nodes, and the run has already chosen them",
            f"leave out {min(chosen)}: {name} finds the run's nodes, and reaches them without SSH",
        )
    if launcher.options is options.deepspeed:
        yield from _deepspeed_problems(given, shape)
    for option in launcher.options(shape, given):
        for spelling in option.names:
            if spelling in given and not _fits(given[spelling], option):
                yield Problem(
                    f"{launcher.name} {spelling} {given[spelling]} does not fit the run, which needs {option.value}",
                    f"leave out {spelling}: {option.remedy}",
                )
    if use.where and not launcher.by_variables and shape.nodes > 1:
        yield from _unfilled(use, name, shape)


def _own_way(use: Use, name: str) -> Problem | None:
    """Return the problem of a launcher that itself reaches other nodes; None for the others."""
    rest = " ".join(use.words[_program(use) :]) or "PROGRAM"
    if use.launcher.name == "srun":
        return Problem(
            f"{name} starts ranks through the batch system, and clusterctl starts them itself",
            f"leave out srun: launch -- {rest}; nodes of a batch system are used inside an allocation, and by submit",
        )
    if use.launcher.instead:
        how = f"launch -- {use.launcher.instead} {rest}"
        return Problem(f"{name} would start ranks on other nodes in its own way", f"use another one: {how}")
    return None


def _deepspeed_problems(given: dict[str, str], shape: Shape) -> Iterator[Problem]:
    if shape.kind != "cpu" and shape.first_device:
        yield Problem(
            "deepspeed counts devices from 0, and the run's devices do not begin there",
            "use devices from 0 on, or start the ranks without deepspeed's launcher",
        )
    chosen = next((name for name in DEEPSPEED_FILTERS if name in given), "")
    if chosen and not {"--hostfile", "-H"} & given.keys():
        yield Problem(
            f"deepspeed {chosen} {given[chosen]} chooses among nodes and devices that the run has already chosen",
            f"leave out {chosen}, and choose by -i FILTER or -x SET of launch",
        )
    if "--launcher" in given:
        yield Problem(
            f"deepspeed --launcher {given['--launcher']} has no effect: clusterctl starts deepspeed on every node",
            "leave out --launcher",
        )


def _accelerate_problems(use: Use, code: Path | None, shape: Shape) -> Iterator[Problem]:
    """Yield the choice by which accelerate starts one process on each node, whatever the number of processes."""
    given = given_options(use)
    if use.launcher.options is not options.accelerate or shape.world == shape.nodes:
        return
    chosen = next((name for name in ("--cpu", "--use_cpu") if name in given), "")
    file = given.get("--config_file", "")
    if not chosen and code is not None and file and not options.ACCELERATE_KINDS & given.keys():
        try:
            text = (code / file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        found = re.search(r"""^distributed_type:\s*['"]?(NO|MULTI_CPU)\b""", text, re.MULTILINE)
        chosen = f"--config_file {file} with distributed_type {found[1]}" if found else ""
    if chosen:
        yield Problem(
            f"accelerate {chosen} starts one process on each node, and the run has {shape.world} ranks",
            "leave it out: the processes detect by themselves that there are only CPUs",
        )


def _unfilled(use: Use, name: str, shape: Shape) -> Iterator[Problem]:
    """Yield the options that a launcher in a script lacks: no variable of its environment fills them in."""
    lacking = [option for option in _open(use, shape) if option.names[0] not in DISPENSABLE]
    if lacking:
        words = [
            word if option.form == "" else f"{option.names[0]} {SPELLED.get(option.names[0], option.value)}"
            for option in lacking
            for word in option.words[:1]
        ]
        rest = " ".join(use.words[_program(use) :]) or "PROGRAM"
        yield Problem(
            f"{name} would start one training on each node: nothing can be filled in inside a script",
            f"start it directly: launch -- {name} {rest}; or write in the script: {name} {' '.join(words)} ...",
        )


def _fits(value: str, option: Option) -> bool:
    if value in (option.value, *option.allowed) or any(mark in value for mark in "{$`"):
        return True
    low, colon, high = value.partition(":")
    # A range of nodes, as torchrun takes it.
    if colon and low.isdigit() and high.isdigit() and option.value.isdigit():
        return int(low) <= int(option.value) <= int(high)
    return False


def given_options(use: Use) -> dict[str, str]:
    """Return the options that a command gives to its launcher; the value of a flag is ""."""
    given: dict[str, str] = {}
    index, end = use.launcher.words, _program(use)
    while index < end:
        name, equals, value = use.words[index].partition("=")
        name = _spelled(name, use.launcher)
        width = _width(use.words[index], use.launcher)
        given[name] = (
            value if equals or width == 1 else " ".join(use.words[index + 1 : min(index + width, end)])
        )
        index += width
    return given


def _width(word: str, launcher: Launcher) -> int:
    """Return how many words an option and its values are."""
    name = _spelled(word.partition("=")[0], launcher)
    if name in launcher.pairs:
        return 3
    if "=" in word or name in launcher.flags:
        return 1
    if launcher.parser and not _is_known(name, launcher):
        return 1 if name in flags(launcher.parser) else 2
    return 2


def _is_known(name: str, launcher: Launcher) -> bool:
    return name in _names(launcher) or any(fnmatchcase(name, pattern) for pattern in launcher.valued)


def _names(launcher: Launcher) -> list[str]:
    """Return the options that are known of a launcher."""
    shape = Shape(0, (1,), (), "", 0, "")
    return [
        *launcher.flags,
        *launcher.pairs,
        *(name for option in launcher.options(shape, {}) for name in option.names),
    ]


def _spelled(name: str, launcher: Launcher) -> str:
    """Return an option as spelled in our tables: launchers accept both - and _, and the beginning of a name."""
    if launcher.options is options.mpi:
        # Its tables have each long name once, with two dashes.
        return f"-{name}" if re.match(r"-[^-].", name) and name != "-np" else name
    if not name.startswith("--"):
        return name
    name = "--" + name[2:].replace("-", "_")
    known = _names(launcher)
    longer = {each for each in known if each.startswith(name)}
    return longer.pop() if name not in known and len(longer) == 1 else name


def _program(use: Use) -> int:
    """Return the index of the program that the launcher starts; the length of the command if there is none."""
    index = use.launcher.words
    while index < len(use.words) and use.words[index].startswith("-"):
        word = use.words[index]
        if word in ("-m", "--module", "--"):
            return index
        index += _width(word, use.launcher)
    return min(index, len(use.words))


def _starts_nothing(use: Use, shape: Shape) -> bool:
    """Return whether a command has no program: no word that is neither an option nor the value of a known one."""
    if use.launcher.options in (options.ray_start, options.nothing):
        return False
    valued = {name for option in use.launcher.options(shape, {}) for name in option.names if option.form}
    spelled = [_spelled(word, use.launcher) for word in use.words[use.launcher.words :]]
    if any(word in ("-h", "--help", "--version", "-m", "--module") or "{" in word for word in spelled):
        return False
    return all(word.startswith("-") or before in valued for before, word in pairwise(["", *spelled]))


def variables(shape: Shape) -> dict[str, str]:
    """Return the variables by which scripts and launchers inside of them learn of the nodes of a run."""
    where = f"{shape.master}:{shape.master_port}"
    return {
        "NNODES": str(shape.nodes),
        "NODE_RANK": str(shape.node_rank),
        "NPROC_PER_NODE": str(shape.here),
        "GPUS_PER_NODE": str(shape.here),
        "FIRST_RANK": str(shape.first_rank),
        "MASTER_ADDR": shape.master,
        "MASTER_PORT": str(shape.master_port),
        "CLUSTERCTL_HOSTFILE": shape.hostfile,
        # torchrun and torch.distributed.launch.
        "PET_NNODES": str(shape.nodes),
        "PET_NODE_RANK": str(shape.node_rank),
        "PET_NPROC_PER_NODE": str(shape.here),
        "PET_MASTER_ADDR": shape.master,
        "PET_MASTER_PORT": str(shape.master_port),
        "PET_RDZV_ENDPOINT": where,
        "PET_RDZV_ID": "clusterctl",
        # Each worker has files of its own, and its whole lines stand in torchrun's output with its rank.
        "PET_LOG_DIR": shape.log_dir,
        "PET_TEE": "3",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]:",
        # paddle.distributed.launch.
        "PADDLE_MASTER": where,
        "PADDLE_NNODES": str(shape.nodes),
        "PADDLE_RANK": str(shape.node_rank),
        "PADDLE_NPROC_PER_NODE": str(shape.here),
        # llamafactory-cli.
        "FORCE_TORCHRUN": "1",
    }
