"""Answers node sets as ClusterShell does; runs under whichever Python has it, one JSON line in and out a case."""

import json
import sys

from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.NodeUtils import GroupResolver, GroupSource


class Table(GroupSource):
    """Groups and nodes that the caller names."""

    def __init__(self, groups, known):
        GroupSource.__init__(self, "table")
        self.held, self.known = groups, known

    def resolv_map(self, group):
        return self.held.get(group, "")

    def resolv_list(self):
        return list(self.held)

    def resolv_all(self):
        return ",".join(self.known)


def main():
    resolver = None
    for line in sys.stdin:
        case = json.loads(line)
        if "groups" in case:
            resolver = GroupResolver(Table(case["groups"], case["known"]))
            continue
        try:
            found = NodeSet(case["set"], resolver=resolver)
            answer = {"names": list(found), "folded": str(found)}
        except NodeSetException as error:
            answer = {"error": str(error)}
        except Exception as error:
            # It has tracebacks of its own: an IndexError on "[]1".
            answer = {"error": f"crashed: {error!r}"}
        sys.stdout.write(json.dumps(answer) + "\n")


main()
