"""Our words for options and commands that users of pdsh, clush, torchrun, mpirun, batch systems and kubectl type."""

from __future__ import annotations

from clusterctl.backends.backend import QUEUES

# Command names of other programs, and our names for them.
COMMANDS = {
    **dict.fromkeys(("pdsh", "clush", "dsh", "pssh", "parallel-ssh"), "exec"),
    **dict.fromkeys(("run", "start", "train", "torchrun", "mpirun", "apply", "finetune"), "launch"),
    **dict.fromkeys(("ps", "list", "squeue"), "runs"),
    **dict.fromkeys(("cp", "scp", "pdcp", "upload"), "push"),
    **dict.fromkeys(("rpdcp", "rcopy"), "pull"),
    **dict.fromkeys(("kill", "scancel", "delete"), "stop"),
    **dict.fromkeys(("chat", "predict", "infer"), "generate"),
    "ls": "nodes",
    "nodeset": "nodes expand",
    "log": "logs",
    "tail": "logs tail",
    "describe": "status",
    **{known.program: f"submit {name}" for name, known in QUEUES.items() if known.program},
    "evaluate": "eval",
    "convert": "checkpoint import",
    "download": "data fetch",
}

_TERMINAL = "`clusterctl ssh NODE` opens a terminal, also for one command"
_NAME_NODES = "name the nodes: -n node[1-4]; without it, all nodes of the inventory are used"
_COUNT_DEVICES = "--devices 8 uses the first 8 devices of each node; --per-node starts one process per node"
_MASTER = "--set master_port=29500 with a job file; the address is that of the first node"
_LABELS = "`--json-lines` has the node as a key, `--out FOLDER` writes a file for each node"
_EXEC = {
    "-R": "choose the SSH client: --ssh openssh, or --ssh paramiko",
    "-X": "leave out a group: -x @GROUP",
    "-B": "-b folds equal output",
    "-L": "-b folds equal output",
    "-N": _LABELS,
    "-S": "leave it out: the exit code is always the largest one of the nodes",
    "-o": "write options of SSH into ~/.ssh/config",
    "-O": "write settings into clusterctl.yaml or ~/.config/clusterctl/config.yaml",
    **dict.fromkeys(("-T", "-i", "-it", "--tty"), _TERMINAL),
    **dict.fromkeys(("--copy", "--dest", "-r"), "clusterctl push SRC DEST -n SET"),
    "--rcopy": "clusterctl pull PATH -n SET",
    "-p": "--port N",
    "--command_timeout": "--timeout SECONDS",
    "--connect_timeout": "--connect-timeout SECONDS",
    "--nostdin": "leave it out: only --stdin sends the standard input",
    **dict.fromkeys(("-q", "--quiet"), "2>/dev/null hides errors; -b shows equal output once"),
    "-k": "leave it out: a node that cannot be reached ends no other",
    **dict.fromkeys(("--become", "-K"), "--sudo"),
    "--worker": "choose the SSH client: --ssh openssh, or --ssh paramiko",
}
_LAUNCH = {
    **dict.fromkeys(("--nnodes", "--num-nodes", "--num_nodes", "-N", "-H", "--host", "--hosts"), _NAME_NODES),
    **dict.fromkeys(
        ("--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num-gpus", "--gpus", "-np", "-ppn", "-g"),
        _COUNT_DEVICES,
    ),
    **dict.fromkeys(
        ("--master-port", "--master_port", "--master-addr", "--master_addr", "--rdzv-endpoint"), _MASTER
    ),
    **dict.fromkeys(("--max-restarts", "--max_restarts"), "--restarts N of `clusterctl launch`"),
    **dict.fromkeys(("--standalone", "--node-rank", "--node_rank"), "leave it out: it is known on each node"),
    "-f": "name the job file alone: clusterctl launch job.yaml",
}
_LOGS = {
    **dict.fromkeys(("--nodes", "-w"), "--node SET shows the ranks of these nodes"),
    **dict.fromkeys(("-c", "--container"), "--rank N shows one rank"),
    **dict.fromkeys(("-p", "--previous"), "`clusterctl logs show RUN --attempt N` shows an earlier attempt"),
}
# The words that name nodes of `exec`: they are read only before the first unknown option.
OF_NODES = ("-a", "--all", "-g", "--group", "-n", "-w", "--nodes")
OPTIONS = {
    "exec": _EXEC,
    "launch": _LAUNCH,
    "plan": _LAUNCH,
    "logs show": _LOGS,
    "logs tail": {**_LOGS, "--tail": "-n N shows the last N lines"},
}


def ours(command: str, option: str) -> str:
    """Return what to write instead of another program's option of a command; "" if it is no such option."""
    return OPTIONS.get(command, {}).get(option, "")
