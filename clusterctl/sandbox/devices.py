"""Simulated accelerators of a node: an hccn.conf, and tools that print what the real ones print.

The file `hccn_tool.answers`, next to hccn.conf, holds the answers of link and health checks. Edit a line to simulate a
fault: `link_0=DOWN`. Add `health_0=Alarm`, `process_0=4711 python 512` or `ping_0=no answer` for a faulty, a busy or an
unreachable device; `npu_name=9392` for boards of an A3 node; `sdid_0=7` for a device at another position in its super
pod.
"""

from __future__ import annotations

import shlex

# Per node; the addresses below are distinct for up to 1,000 such nodes.
MAX_DEVICES = 16
# Devices i and i+4 share a subnet, as on an eight-device Ascend board.
PER_SUBNET = 4
SUBNETS = (10, 20, 30, 40)
VIRTUAL_SUBNETS = (110, 120, 130, 140)
# The first super device id of the vendor's own example.
SDID = 37748736


def device_address(node: int, device: int, devices: int, subnets: tuple[int, ...] = SUBNETS) -> str:
    """Return the network address of a device; `node` counts from 1, `devices` is the number per node."""
    rows = -(-devices // PER_SUBNET)
    block, host = divmod((node - 1) * rows + device // PER_SUBNET, 254)
    return f"192.{168 + block}.{subnets[device % PER_SUBNET]}.{host + 1}"


def hccn_conf(node: int, devices: int) -> str:
    """Return the text of /etc/hccn.conf of a node."""
    return "".join(
        f"address_{device}={device_address(node, device, devices)}\nnetmask_{device}=255.255.255.0\n"
        for device in range(devices)
    )


def answers(node: int, devices: int) -> str:
    """Return the answers of hccn_tool about the devices, besides their addresses."""
    lines = []
    for device in range(devices):
        virtual = device_address(node, device, devices, VIRTUAL_SUBNETS)
        lines += [
            f"ipv6_address_{device}=fd00::{node:x}:{device:x}",
            f"prefix_length_{device}=64",
            f"vnic_address_{device}={virtual}",
            f"vnic_netmask_{device}=255.255.255.0",
            f"link_{device}=UP",
            f"net_health_{device}=Success",
            f"speed_{device}=100000",
        ]
    return "\n".join(lines) + "\n"


def hccn_tool(conf: str, answers_file: str, devices: int) -> str:
    """Return the script `hccn_tool` of a node whose files have these paths."""
    return _HCCN_TOOL.format(conf=shlex.quote(conf), answers=shlex.quote(answers_file), devices=devices)


def npu_smi(node: int, devices: int, answers_file: str) -> str:
    """Return the script `npu-smi` of a node whose answers are in this file."""
    answers = shlex.quote(answers_file)
    sdid = SDID + ((node - 1) << 16)
    return _NPU_SMI.format(devices=devices, sdid=sdid, server=node - 1, answers=answers)


# POSIX sh without child processes: building a rank table runs it once per device, and a node may have 16 devices.
_HCCN_TOOL = """\
#!/bin/sh
# A simulated hccn_tool: it answers for the devices of a sandbox node, in the formats of the real one.
conf={conf}
answers={answers}
devices={devices}

value() {{ # FILE KEY: print the text after KEY= in FILE, or nothing
    while IFS='=' read -r key text; do
        if [ "$key" = "$2" ]; then printf '%s' "$text"; return; fi
    done < "$1"
}}

pair() {{ # FILE KEY LABEL KEY LABEL: print two lines, or nothing if the device is not configured
    first=$(value "$1" "$2")
    [ -n "$first" ] || return 0
    printf '%s:%s\\n%s:%s\\n' "$3" "$first" "$5" "$(value "$1" "$4")"
}}

device= what= get= six= target=
while [ $# -gt 0 ]; do
    case $1 in
        -i) device=${{2-}}; [ $# -gt 1 ] && shift ;;
        -g) get=1 ;;
        address) target=${{2-}}; [ $# -gt 1 ] && shift ;;
        -inet6) six=6 ;;
        -s) echo "hccn_tool: a sandbox's devices are read only" >&2; exit 1 ;;
        -*) what=${{1#-}} ;;
        *) echo "hccn_tool: unexpected argument: $1" >&2; exit 1 ;;
    esac
    shift
done
case $device in
    ''|*[!0-9]*) echo "hccn_tool: -i wants a device number" >&2; exit 1 ;;
esac
if [ "$device" -ge "$devices" ]; then echo "hccn_tool: there is no device $device" >&2; exit 1; fi
if [ -z "$get" ]; then echo "hccn_tool: nothing to do without -g" >&2; exit 1; fi

case $what$six in
    ip) pair "$conf" "address_$device" ipaddr "netmask_$device" netmask ;;
    ip6) pair "$answers" "ipv6_address_$device" ipv6_address "prefix_length_$device" prefix_length ;;
    vnic) pair "$answers" "vnic_address_$device" ipaddr "vnic_netmask_$device" netmask ;;
    link) echo "link status: $(value "$answers" "link_$device")" ;;
    net_health) echo "net health status: $(value "$answers" "net_health_$device")" ;;
    ping)
        said=$(value "$answers" "ping_$device")
        if [ -n "$said" ]; then echo "$said"; exit 1; fi
        echo "device $device PING $target"
        echo "recv seq=0,time=0.100000ms"
        echo "1 packets transmitted, 1 received, 0.00% packet loss" ;;
    speed) echo "Speed: $(value "$answers" "speed_$device") Mb/s" ;;
    *) echo "hccn_tool: a sandbox's devices do not answer -$what" >&2; exit 1 ;;
esac
"""

_NPU_SMI = """\
#!/bin/sh
# A simulated npu-smi: it answers the requests of a launcher for the devices of a sandbox node.
devices={devices}
answers={answers}

value() {{ # KEY: print the text after KEY= in the answers, or nothing
    while IFS='=' read -r key text; do
        if [ "$key" = "$1" ]; then printf '%s' "$text"; return; fi
    done < "$answers"
}}

[ "${{1-}}" = info ] || {{ echo "npu-smi: only info is answered in a sandbox" >&2; exit 1; }}
shift
card= what=
while [ $# -gt 0 ]; do
    case $1 in
        -i) card=${{2-}}; [ $# -gt 1 ] && shift ;;
        -c) [ $# -gt 1 ] && shift ;;
        -t) what=${{2-}}; [ $# -gt 1 ] && shift ;;
        -m|-l) what=${{1#-}} ;;
        *) echo "npu-smi: unexpected argument: $1" >&2; exit 1 ;;
    esac
    shift
done
case $card in
    '') ;;
    *[!0-9]*) echo "npu-smi: -i wants a device number" >&2; exit 1 ;;
    *) if [ "$card" -ge "$devices" ]; then echo "npu-smi: there is no device $card" >&2; exit 1; fi ;;
esac
case $what in
    '')
        n=0
        while [ "$n" -lt "$devices" ]; do
            health=$(value "health_$n")
            printf '| %s     910B3               | %s            ' "$n" "${{health:-OK}}"
            printf '| 90.0        36                0    / 0             |\\n'
            printf '| 0                         | 0000:C%s:00.0  ' "$n"
            printf '| 0           0    / 0          3415 / 65536         |\\n'
            n=$((n + 1))
        done
        n=0
        while [ "$n" -lt "$devices" ]; do
            process=$(value "process_$n")
            if [ -n "$process" ]; then
                set -- $process
                printf '| %s       0                 | %s        | %s          | %s |\\n' "$n" "$1" "$2" "$3"
            else
                echo "| No running processes found in NPU $n |"
            fi
            n=$((n + 1))
        done ;;
    m)
        printf 'NPU ID\\tChip ID\\tChip Logic ID\\tChip Name\\n'
        n=0
        while [ "$n" -lt "$devices" ]; do
            printf '%s\\t0\\t%s\\tAscend 910\\n' "$n" "$n"
            n=$((n + 1))
        done ;;
    l) echo "Total Count : $devices" ;;
    health) echo "Health Status : OK" ;;
    board)
        printf 'NPU ID : %s\\n' "${{card:-0}}"
        name=$(value npu_name)
        if [ -n "$name" ]; then printf 'NPU Name : %s\\n' "$name"; else echo "Chip Type : Ascend"; fi
        if [ -n "$name" ]; then echo "Chip Name : Ascend910"; else echo "Chip Name : 910B3"; fi ;;
    spod-info)
        sdid=$(value "sdid_${{card:-0}}")
        printf 'SDID : %s\\nSuper Pod ID : 0\\nServer Index : {server}\\n' \\
            "${{sdid:-$(({sdid} + ${{card:-0}}))}}" ;;
    *) echo "npu-smi: a sandbox's devices do not answer info $what" >&2; exit 1 ;;
esac
"""
