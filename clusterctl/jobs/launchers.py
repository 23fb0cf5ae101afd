"""Commands that start the ranks of a node themselves: torchrun, deepspeed, accelerate, msrun, mpirun.

Such a command runs once per node. Options that it leaves out (number of nodes and devices, rank of the node, address
and port of the first node, hostfile) are filled in; options that contradict the nodes of the run are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from clusterctl import text
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Node

TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun")


@dataclass(frozen=True)
class Shape:
    """Facts about the nodes of a run, for the launcher on one of them."""

    node_rank: int
    devices: tuple[int, ...]
    """How many devices each node has."""
    names: tuple[str, ...]
    """Names that a command may use for the first node: its name, host and address."""
    master: str
    master_port: int
    hostfile: str
    log_dir: str
    """The folder for files of a launcher."""
    kind: str = "cpu"
    first_device: int = 0
    node_names: tuple[str, ...] = ()
    """The names of all nodes, in the order of their ranks."""

    @property
    def nodes(self) -> int:
        return len(self.devices)

    @property
    def world(self) -> int:
        return sum(self.devices)


def shapes(
    nodes: Sequence[Node], devices: Sequence[Sequence[int]], master_port: int, hostfile: str
) -> list[Shape]:
    """Return the shape of a run for each of its nodes; `devices` are those that the run uses on each."""
    return [
        Shape(
            node_rank=number,
            devices=tuple(map(len, devices)),
            names=(nodes[0].name, nodes[0].host),
            master=nodes[0].address,
            master_port=master_port,
            hostfile=hostfile,
            log_dir=str(PurePath(hostfile).parent / "launcher"),
            kind=node.kind,
            first_device=devices[number][0] if devices[number] else 0,
            node_names=tuple(each.name for each in nodes),
        )
        for number, node in enumerate(nodes)
    ]


@dataclass(frozen=True)
class Problem:
    """A problem of a command, with its remedy."""

    text: str
    remedy: str


CHOOSE_NODES = "choose the nodes by -n SET, or `nodes` in a job file"
CHOOSE_DEVICES = "choose the devices by --devices, or `devices` in a job file"


def _choose_nodes(shape: Shape, wanted: str | None) -> str:
    """Return how the nodes of a run are chosen: the first `wanted` ones by their names, as launchers choose them."""
    if not wanted or not wanted.isdecimal() or not int(wanted[:9]) or not shape.node_names:
        return CHOOSE_NODES
    if int(wanted[:9]) > len(shape.node_names):
        return f"the run has {text.plural(len(shape.node_names), 'node')}; more must be in the inventory"
    first = nodeset.fold(shape.node_names[: int(wanted)])
    which = "the first node" if int(wanted) == 1 else f"the first {wanted} nodes"
    return f"choose {which} by -n {first}, or `nodes: {first}` in a job file"


@dataclass(frozen=True)
class Option:
    """An option of a launcher: its spellings, the value to fill in, and the values that fit the run."""

    names: tuple[str, ...]
    value: str
    allowed: tuple[str, ...] = ()
    """Further values that fit, but are never filled in."""
    fill: bool = True
    form: str = "="
    """How the option is written: "=" as --name=value, " " as two words, "" without a value."""
    remedy: str = "it is filled in on every node"
    """What to do instead of giving another value."""

    @property
    def words(self) -> list[str]:
        name = self.names[0]
        return {"=": [f"{name}={self.value}"], " ": [name, self.value], "": [name]}[self.form]


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, as named in a command."""

    name: str
    words: int
    """How many words of the command name it: 3 for `python -m torch.distributed.run`."""
    flags: frozenset[str]
    """Its options without a value."""
    options: Callable[[Shape, dict[str, str]], list[Option]]


def recognise(command: Sequence[str]) -> Launcher | None:
    """Return the launcher that a command begins with; None for any other program."""
    command = tuple(command)
    first = PurePath(command[0]).name if command else ""
    if first.startswith("python") and len(command) > 2 and command[1] == "-m" and command[2] in TORCH_MODULES:
        return Launcher(command[2], 3, TORCH_FLAGS, _torchrun)
    if first == "accelerate":
        return (
            Launcher("accelerate", 2, ACCELERATE_FLAGS, _accelerate) if command[1:2] == ("launch",) else None
        )
    if first in MPI:
        return Launcher(first, 1, frozenset(), _mpi)
    known = {
        "torchrun": Launcher("torchrun", 1, TORCH_FLAGS, _torchrun),
        "deepspeed": Launcher("deepspeed", 1, DEEPSPEED_FLAGS, _deepspeed),
        "msrun": Launcher("msrun", 1, frozenset(), _msrun),
    }
    return known.get(first)


def program_of(command: Sequence[str]) -> str:
    """Return the program that a launcher's command starts; "" for any other command."""
    launcher = recognise(command)
    if launcher is None:
        return ""
    rest = [word for word in command[_program(launcher, command) :] if not word.startswith("-")]
    return next((word for word in rest if not PurePath(word).name.startswith("python")), "")


def completed(command: Sequence[str], shape: Shape) -> list[str]:
    """Return a launcher's command with the options that it leaves open."""
    launcher = recognise(command)
    if launcher is None:
        return list(command)
    # The node's Python has this module wherever torch is; the script torchrun may be missing, or be another Python's.
    name = ["python", "-m", TORCH_MODULES[0]] if command[0] == "torchrun" else command[: launcher.words]
    return [*name, *_missing(launcher, command, shape), *command[launcher.words :]]


def additions(command: Sequence[str], shape: Shape) -> list[str]:
    """Return the options that are filled in."""
    launcher = recognise(command)
    return _missing(launcher, command, shape) if launcher else []


def _missing(launcher: Launcher, command: Sequence[str], shape: Shape) -> list[str]:
    given = _given(launcher, command)
    missing = [option for option in launcher.options(shape, given) if option.fill]
    return [
        word for option in missing if not any(name in given for name in option.names) for word in option.words
    ]


def problems(command: Sequence[str], shape: Shape) -> Iterator[Problem]:
    """Yield the options of a launcher's command that contradict the nodes of the run."""
    launcher = recognise(command)
    if launcher is None:
        return
    if launcher.name in MPI and shape.nodes > 1:
        rest = " ".join(command[_program(launcher, command) :]) or "PROGRAM"
        yield Problem(
            f"{launcher.name} would start ranks on other nodes with its own SSH",
            f"clusterctl starts the ranks: launch --env-style mpi -- {rest}",
        )
        return
    given = _given(launcher, command)
    if _starts_nothing(launcher, command, shape):
        name = " ".join(command[: launcher.words])
        yield Problem(f"{name} is given no program to start", f"write it at the end: {name} train.py")
    if launcher.options is _torchrun and "--standalone" in given and shape.nodes > 1:
        yield Problem(
            f"{launcher.name} --standalone is for one node, and the run has {shape.nodes}",
            "leave out --standalone: the first node's address is filled in",
        )
    if launcher.name == "deepspeed" and shape.kind != "cpu" and shape.first_device:
        yield Problem(
            "deepspeed counts devices from 0, and the run's devices do not begin there",
            "use devices from 0 on, or start the ranks without deepspeed's launcher",
        )
    chosen = next((name for name in DEEPSPEED_FILTERS if name in given), "")
    if launcher.name == "deepspeed" and chosen and "--hostfile" not in given:
        yield Problem(
            f"deepspeed {chosen} {given[chosen]} chooses among nodes and devices that the run has already chosen",
            f"leave out {chosen}, and choose by -i FILTER or -x SET of launch",
        )
    for option in launcher.options(shape, given):
        for name in option.names:
            if name in given and not _fits(given[name], option):
                yield Problem(
                    f"{launcher.name} {name} {given[name]} does not fit the run, which needs {option.value}",
                    f"leave out {name}: {option.remedy}",
                )


def _fits(value: str, option: Option) -> bool:
    if value in (option.value, *option.allowed) or "{" in value:
        return True
    low, colon, high = value.partition(":")
    # A range of nodes, as torchrun takes it.
    if colon and low.isdigit() and high.isdigit() and option.value.isdigit():
        return int(low) <= int(option.value) <= int(high)
    return False


def _given(launcher: Launcher, command: Sequence[str]) -> dict[str, str]:
    """Return the options that a command gives to its launcher; the value of a flag is ""."""
    given: dict[str, str] = {}
    index, end = launcher.words, _program(launcher, command)
    while index < end:
        name, equals, value = command[index].partition("=")
        name = _spelled(name)
        if equals or name in launcher.flags:
            given[name] = value
            index += 1
        else:
            given[name] = command[index + 1] if index + 1 < end else ""
            index += 2
    return given


def _spelled(name: str) -> str:
    """Return an option as spelled in our tables: torchrun and others accept both - and _."""
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def _program(launcher: Launcher, command: Sequence[str]) -> int:
    """Return the index of the program that the launcher starts; the length of the command if there is none."""
    index = launcher.words
    while index < len(command) and command[index].startswith("-"):
        word = command[index]
        if word in ("-m", "--module", "--"):
            return index
        index += 1 if "=" in word or _spelled(word) in launcher.flags else 2
    return min(index, len(command))


def _starts_nothing(launcher: Launcher, command: Sequence[str], shape: Shape) -> bool:
    """Return whether a command has no program: no word that is neither an option nor the value of a known one."""
    valued = {name for option in launcher.options(shape, {}) for name in option.names if option.form}
    words = [(_spelled(word), before) for before, word in pairwise(["", *command[launcher.words :]])]
    if any(word in ("-h", "--help", "--version", "-m", "--module") or "{" in word for word, _ in words):
        return False
    return all(word.startswith("-") or _spelled(before) in valued for word, before in words)


TORCH_FLAGS = frozenset(("--standalone", "--no_python", "--run_path", "--use_env", "--disable_nccl_affinity"))
DEEPSPEED_FLAGS = frozenset(
    (
        "--no_python", "--module", "--no_local_rank", "--save_pid", "--bind_cores_to_rank", "--force_multi",
        "--no_ssh", "--no_ssh_check", "--elastic_training", "--enable_elastic_training",
    )
)  # fmt: skip
DEEPSPEED_FILTERS = ("--include", "-i", "--exclude", "-e")
ACCELERATE_FLAGS = frozenset(
    (
        "--multi_gpu", "--cpu", "--use_cpu", "--tpu", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm",
        "--use_xpu", "--debug", "--no_python", "--tpu_cluster", "--tpu_use_cluster", "--quiet", "-q",
        "--same_network", "--enable_cpu_affinity", "--tpu_use_sudo",
    )
)  # fmt: skip
ACCELERATE_DEFAULTS = (("--mixed_precision", "no"), ("--dynamo_backend", "no"))
# With one of these options the user chooses how accelerate runs.
ACCELERATE_KINDS = frozenset(
    ("--multi_gpu", "--cpu", "--use_cpu", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--tpu")
)


def _torchrun(shape: Shape, given: dict[str, str]) -> list[Option]:
    here = str(shape.devices[shape.node_rank])
    kinds = ("auto", "gpu", "cpu", "npu", "xpu")
    options = [Option(("--nproc_per_node",), here, kinds, remedy=CHOOSE_DEVICES)]
    if "--standalone" in given:
        return options
    options.append(
        Option(("--nnodes",), str(shape.nodes), remedy=_choose_nodes(shape, given.get("--nnodes")))
    )
    if given.get("--rdzv_backend", "static") != "static":
        # The user chose a rendezvous: it must be on the first node.
        endpoint = f"{shape.master}:{shape.master_port}"
        where = tuple(f"{name}:{shape.master_port}" for name in shape.names)
        named = given.get("--rdzv_endpoint", endpoint)
        identity = given.get("--rdzv_id", "clusterctl")
        return [
            *options,
            Option(("--rdzv_endpoint",), endpoint, (*where, named)),
            Option(("--rdzv_id",), "clusterctl", (identity,)),
        ]
    port = given.get("--master_port", str(shape.master_port))
    return [
        *options,
        Option(("--node_rank",), str(shape.node_rank)),
        Option(("--master_addr",), shape.master, shape.names),
        Option(("--master_port",), str(shape.master_port), (port,)),
    ]


def _deepspeed(shape: Shape, given: dict[str, str]) -> list[Option]:
    port = given.get("--master_port", str(shape.master_port))
    mine = given.get("--hostfile", shape.hostfile)
    return [
        Option(("--hostfile", "-H"), shape.hostfile, (mine,)),
        Option(("--no_ssh",), "", form=""),
        Option(("--node_rank",), str(shape.node_rank)),
        Option(("--master_addr",), shape.master, shape.names),
        Option(("--master_port",), str(shape.master_port), (port,)),
        Option(
            ("--num_nodes",),
            str(shape.nodes),
            fill=False,
            remedy=_choose_nodes(shape, given.get("--num_nodes")),
        ),
        Option(("--num_gpus",), str(shape.devices[shape.node_rank]), fill=False, remedy=CHOOSE_DEVICES),
    ]


def _accelerate(shape: Shape, given: dict[str, str]) -> list[Option]:
    port = given.get("--main_process_port", str(shape.master_port))
    options = [
        Option(("--num_processes",), str(shape.world)),
        Option(
            ("--num_machines",), str(shape.nodes), remedy=_choose_nodes(shape, given.get("--num_machines"))
        ),
        Option(("--machine_rank",), str(shape.node_rank)),
        Option(("--main_process_ip",), shape.master, shape.names),
        Option(("--main_process_port",), str(shape.master_port), (port,)),
    ]
    # Without a configuration file accelerate guesses from the devices that it sees.
    if "--config_file" not in given:
        options += [Option((name,), value, (given.get(name, value),)) for name, value in ACCELERATE_DEFAULTS]
        if shape.world > 1 and not ACCELERATE_KINDS & given.keys():
            # accelerate's name for torchrun on every node; the processes detect by themselves that there are only CPUs.
            options.append(Option(("--multi_gpu",), "", form=""))
    return options


def _msrun(shape: Shape, given: dict[str, str]) -> list[Option]:
    port = given.get("--master_port", str(shape.master_port))
    return [
        Option(("--worker_num",), str(shape.world)),
        Option(("--local_worker_num",), str(shape.devices[shape.node_rank]), remedy=CHOOSE_DEVICES),
        Option(("--node_rank",), str(shape.node_rank)),
        Option(("--master_addr",), shape.master, shape.names),
        Option(("--master_port",), str(shape.master_port), (port,)),
        Option(("--join",), "True", (given.get("--join", "True"),)),
        # Files of its workers belong next to the logs, not into the folder of the pushed code.
        Option(("--log_dir",), shape.log_dir, (given.get("--log_dir", shape.log_dir),)),
    ]


def _mpi(shape: Shape, given: dict[str, str]) -> list[Option]:
    # `-np` and `-n` of all MPIs; a smaller number is the user's choice.
    number = next((given[name] for name in ("-np", "-n", "--np") if name in given), str(shape.world))
    return [Option(("-np", "-n", "--np"), str(shape.world), (number,), form=" ")]
