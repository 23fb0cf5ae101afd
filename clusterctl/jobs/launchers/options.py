"""The options of each launcher: those that are filled in, with the values that fit a run, and those without a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from clusterctl import text
from clusterctl.inventory import nodeset

CHOOSE_NODES = "choose the nodes by -n SET, or `nodes` in a job file"
CHOOSE_DEVICES = "choose the devices by --devices, or `devices` in a job file"


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
    first_rank: int = 0
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

    @property
    def log_dir(self) -> str:
        """The folder for files of a launcher."""
        return str(PurePath(self.hostfile).parent / "launcher")

    @property
    def here(self) -> int:
        """The number of devices of this node."""
        return self.devices[self.node_rank]

    def choose_nodes(self, wanted: str | None) -> str:
        """Return how the first `wanted` nodes of a run, as launchers choose them, are chosen by their names."""
        if not wanted or not wanted.isdecimal() or not int(wanted[:9]) or not self.node_names:
            return CHOOSE_NODES
        if int(wanted[:9]) > len(self.node_names):
            return f"the run has {text.plural(len(self.node_names), 'node')}; more must be in the inventory"
        first = nodeset.fold(self.node_names[: int(wanted)])
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


def _free(name: str, given: dict[str, str], value: str, *more: str) -> Option:
    """Return an option that is filled in, but whose value is the user's choice."""
    return Option((name, *more), value, tuple(given[each] for each in (name, *more) if each in given))


def torchrun(shape: Shape, given: dict[str, str]) -> list[Option]:
    kinds = ("auto", "gpu", "cpu", "npu", "xpu")
    options = [Option(("--nproc_per_node",), str(shape.here), kinds, remedy=CHOOSE_DEVICES)]
    if "--standalone" in given:
        return options
    nodes = Option(("--nnodes",), str(shape.nodes), remedy=shape.choose_nodes(given.get("--nnodes")))
    options.append(nodes)
    if given.get("--rdzv_backend", "static") != "static":
        # The user chose a rendezvous: it must be on the first node.
        endpoint = f"{shape.master}:{shape.master_port}"
        where = (f"{name}:{shape.master_port}" for name in shape.names)
        named = given.get("--rdzv_endpoint", endpoint)
        return [
            *options,
            Option(("--rdzv_endpoint",), endpoint, (*where, named)),
            _free("--rdzv_id", given, "clusterctl"),
        ]
    return [
        *options,
        Option(("--node_rank",), str(shape.node_rank)),
        Option(("--master_addr",), shape.master, shape.names),
        _free("--master_port", given, str(shape.master_port)),
    ]


def deepspeed(shape: Shape, given: dict[str, str]) -> list[Option]:
    chosen = shape.choose_nodes(given.get("--num_nodes"))
    return [
        _free("--hostfile", given, shape.hostfile, "-H"),
        Option(("--no_ssh",), "", form=""),
        Option(("--node_rank",), str(shape.node_rank)),
        Option(("--master_addr",), shape.master, shape.names),
        _free("--master_port", given, str(shape.master_port)),
        Option(("--num_nodes",), str(shape.nodes), fill=False, remedy=chosen),
        Option(
            ("--num_gpus", "--num_accelerators"), str(shape.here), fill=False, remedy=CHOOSE_DEVICES
        ),
    ]  # fmt: skip


# With one of these options the user chooses how accelerate runs.
ACCELERATE_KINDS = frozenset(
    ("--multi_gpu", "--cpu", "--use_cpu", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--tpu")
)


def accelerate(shape: Shape, given: dict[str, str]) -> list[Option]:
    chosen = shape.choose_nodes(given.get("--num_machines"))
    options = [
        Option(("--num_processes",), str(shape.world)),
        Option(("--num_machines",), str(shape.nodes), remedy=chosen),
        Option(("--machine_rank",), str(shape.node_rank)),
        Option(("--main_process_ip",), shape.master, shape.names),
        _free("--main_process_port", given, str(shape.master_port)),
    ]
    # accelerate's own defaults count more than torchrun's variables.
    if not {"--tee", "-t"} & given.keys():
        options += [Option(("--tee",), "3"), _free("--log_dir", given, shape.log_dir)]
    # Without a configuration file accelerate guesses from the devices that it sees.
    if "--config_file" not in given:
        options += [_free("--mixed_precision", given, "no"), _free("--dynamo_backend", given, "no")]
        if shape.world > 1 and not ACCELERATE_KINDS & given.keys():
            # accelerate's name for torchrun on every node; the processes detect by themselves that there are only CPUs.
            options.append(Option(("--multi_gpu",), "", form=""))
    return options


def msrun(shape: Shape, given: dict[str, str]) -> list[Option]:
    return [
        Option(("--worker_num",), str(shape.world)),
        Option(("--local_worker_num",), str(shape.here), remedy=CHOOSE_DEVICES),
        Option(("--node_rank",), str(shape.node_rank)),
        Option(("--master_addr",), shape.master, shape.names),
        _free("--master_port", given, str(shape.master_port)),
        _free("--join", given, "True"),
        # Files of its workers belong next to the logs, not into the folder of the pushed code.
        _free("--log_dir", given, shape.log_dir),
    ]


def composer(shape: Shape, given: dict[str, str]) -> list[Option]:
    return [
        Option(("--nproc", "-n"), str(shape.here), remedy=CHOOSE_DEVICES),
        Option(("--world_size",), str(shape.world)),
        Option(("--base_rank",), str(shape.first_rank)),
        Option(("--node_rank",), str(shape.node_rank)),
        Option(("--master_addr",), shape.master, shape.names),
        _free("--master_port", given, str(shape.master_port)),
    ]


def paddle(shape: Shape, given: dict[str, str]) -> list[Option]:
    where = f"{shape.master}:{shape.master_port}"
    return [
        _free("--master", given, where, "--ips"),
        Option(("--nnodes",), str(shape.nodes), remedy=shape.choose_nodes(given.get("--nnodes"))),
        Option(("--rank",), str(shape.node_rank)),
        Option(("--nproc_per_node",), str(shape.here), remedy=CHOOSE_DEVICES),
        _free("--log_dir", given, shape.log_dir),
    ]


def ray_start(shape: Shape, given: dict[str, str]) -> list[Option]:
    head, where = shape.node_rank == 0, f"{shape.master}:{shape.master_port}"
    # A program that leaves the foreground would end with the run.
    waits = Option(("--block",), "", form="")
    if head:
        port = _free("--port", given, str(shape.master_port))
        return [Option(("--head",), "", form=""), port, waits]
    return [
        Option(("--address",), where, tuple(f"{name}:{shape.master_port}" for name in shape.names)),
        waits,
    ]


def colossalai(shape: Shape, given: dict[str, str]) -> list[Option]:
    return [Option(("--nproc_per_node",), str(shape.here), remedy=CHOOSE_DEVICES)]


def mpi(shape: Shape, given: dict[str, str]) -> list[Option]:
    # `-np` and `-n` of all MPIs; a smaller number is the user's choice.
    number = next((given[name] for name in ("-np", "-n", "--np") if name in given), str(shape.world))
    return [Option(("-np", "-n", "--np"), str(shape.world), (number,), form=" ")]


def nothing(shape: Shape, given: dict[str, str]) -> list[Option]:
    return []


Options = Callable[[Shape, dict[str, str]], list[Option]]

TORCH_FLAGS = (
    "--standalone", "--no_python", "--run_path", "--use_env", "--disable_nccl_affinity", "--virtual_local_rank",
)  # fmt: skip
DEEPSPEED_FLAGS = (
    "--no_python", "--no_local_rank", "--save_pid", "--bind_cores_to_rank", "--force_multi", "--no_ssh",
    "--no_ssh_check", "--elastic_training", "--enable_elastic_training", "-q", "--quiet",
)  # fmt: skip
# Further options with a value; a star stands for any end.
TORCH_VALUED = (
    "--rdzv_*", "--max_restarts", "--monitor_interval", "--start_method", "--event_log_handler", "--role", "--log_dir",
    "--redirects", "-r", "--tee", "-t", "--local_ranks_filter", "--duplicate_*", "--local_addr", "--logs_specs",
    "--numa_binding", "--signals_to_handle", "--shutdown_timeout",
)  # fmt: skip
DEEPSPEED_VALUED = (
    "--include", "-i", "--exclude", "-e", "--launcher", "--launcher_args", "--enable_each_rank_log", "--autotuning",
    "--bind_core_list", "--ssh_port", "--venv_script", "--log_level", "--min_elastic_nodes", "--max_elastic_nodes",
)  # fmt: skip
ACCELERATE_VALUED = (
    "--config_file", "--num_cpu_threads_per_process", "--dynamo_*", "--gpu_ids", "--tee", "-t", "--log_dir", "--role",
    "--rdzv_*", "--max_restarts", "--monitor_interval", "--main_training_function", "--deepspeed_*", "--zero*",
    "--offload_*", "--gradient_*", "--fsdp_*", "--megatron_lm_*", "--fp8_*", "--aws_*", "--mpirun_*",
    "--parallelism_config_*",
)  # fmt: skip
# Of Open MPI and of MPICH; both accept one dash or two.
MPI_FLAGS = (
    "--oversubscribe", "--allow-run-as-root", "--tag-output", "--timestamp-output", "--display-map", "--nolocal",
    "--report-bindings", "--bynode", "--byslot", "--verbose", "-v", "-q", "-l", "--prepend-rank", "--genvall",
    "--envall", "--genvnone", "--envnone", "--do-not-launch", "--disable-auto-cleanup", "--mca-base-env-list",
)  # fmt: skip
MPI_PAIRS = ("--mca", "--gmca", "--genv", "--env", "--prtemca", "--pmixmca", "--omca")
# Options that choose nodes.
MPI_HOSTS = (
    "--hostfile", "--machinefile", "--default-hostfile", "--rankfile", "-f", "--hosts", "--host", "-H", "--launcher",
    "--launcher-exec", "--bootstrap", "--bootstrap-exec", "--ppn",
)  # fmt: skip
ACCELERATE_FLAGS = (
    *ACCELERATE_KINDS, "--use_xpu", "--debug", "--no_python", "--tpu_cluster", "--tpu_use_cluster", "--no_tpu_cluster",
    "--quiet", "-q", "--same_network", "--enable_cpu_affinity", "--tpu_use_sudo", "--vm", "--env", "--downcast_bf16",
    "--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation", "--use_parallelism_config",
    "--fp8_use_autocast_during_eval",
)  # fmt: skip
