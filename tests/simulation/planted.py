"""Bugs of one to five lines in the decisions; the simulation finds each of them."""

from __future__ import annotations

from tests.simulation.decisions import AGENT, ATTEMPT, RESTARTS, RUN

Bug = tuple[str, str, str]
BUGS: dict[str, Bug] = {
    "a request that failed is not sent again": (
        ATTEMPT,
        "missed = (event.missed & state.asked) - (state.ends.keys() - state.left)",
        "missed = set()",
    ),
    "a stop skips the nodes that do not answer": (
        ATTEMPT,
        "names = (state.nodes - state.ends.keys()) | state.due.keys() | state.asked",
        "names = (state.nodes - state.ends.keys() - state.away.keys()) | state.due.keys() | state.asked",
    ),
    "ranks of a lost node are forgotten": (
        ATTEMPT,
        "return frozenset(name for name, phase in self.ends.items() if phase is Phase.LOST) - self.obeyed",
        "return frozenset()",
    ),
    "an address that cannot be looked up is a lost node": (
        ATTEMPT,
        "limits = {name: max(ALONE, patience) if name in state.nameless else patience for name in away}",
        "limits = dict.fromkeys(away, patience)",
    ),
    "the launcher's own broken link is a loss of all nodes": (
        ATTEMPT,
        "someone = event.quiet < QUIET",
        "someone = True",
    ),
    "a failure stops all nodes but one": (
        ATTEMPT,
        "- {failed}) | state.left",
        "- {failed, max(state.nodes)})",
    ),
    "after the roll call nobody is asked to stop": (
        ATTEMPT,
        "replace(state, rolling=False, request=event.request)",
        "replace(state, request=event.request)",
    ),
    "a broken connection is not opened again": (ATTEMPT, "[*actions, Dial(name)]", "actions"),
    "a node that answers again still counts as away": (
        ATTEMPT,
        "if name not in event.names}\n    state = replace(state, away=away,",
        "if name not in event.names}\n    state = replace(state, away=state.away,",
    ),
    "a request to stop leaves the ranks of a dead supervisor": (
        AGENT,
        'sweep = ["sweep"] if gone and seen.phase not in FINAL else []',
        "sweep = []",
    ),
    "a rank that fails is no failure": (
        AGENT,
        'if event.kind == "exited" and event.failure and state.failure is None',
        'if event.kind == "hexed" and event.failure and state.failure is None',
    ),
    "a stopped attempt counts as finished": (
        AGENT,
        'return "stopped" if self.stopped else "finished"',
        'return "finished"',
    ),
    "an attempt starts beside the ranks of the last one": (
        RUN,
        "if silent := lost & {node.name for node in nodes}:",
        "if silent := set():",
    ),
    "one spare replaces two nodes": (RESTARTS, "chosen.append(free.pop(0))", "chosen.append(free[0])"),
    "a lost node is not replaced": (
        RESTARTS,
        "if node.name not in lost:\n            chosen",
        "if node:\n            chosen",
    ),
    "a conclusion forgets the nodes that it could not stop": (
        RUN,
        "return Conclusion(decision.why, ended)",
        "return Conclusion(decision.why, Ended(ended.failure))",
    ),
    "an attempt is over when its first node is": (
        ATTEMPT,
        "if len(self.ends) < len(self.nodes):",
        "if not self.ends:",
    ),
    "a node is lost a little too early": (
        ATTEMPT,
        "LOOK = 0.2",
        "LOOK = 3.0",
    ),
    "a request to stop tells the supervisor nothing": (AGENT, '[*actions, "terminate"]', "actions"),
    "the grace after a failure never ends": (
        AGENT,
        'Action("end", grace=min(state.grace, FAILED_GRACE))',
        'Action("end", grace=1e9)',
    ),
    "a restart ends nothing of the last attempt": (
        RUN,
        "answered: Collection[str] = yield Clear(wanted)",
        "answered: Collection[str] = [node.name for node in wanted]",
    ),
}
# The first seed that finds each.
FOUND_BY = {
    "a request that failed is not sent again": 218,
    "a stop skips the nodes that do not answer": 52,
    "ranks of a lost node are forgotten": 9,
    "an address that cannot be looked up is a lost node": 217,
    "the launcher's own broken link is a loss of all nodes": 2728,
    "a failure stops all nodes but one": 4,
    "after the roll call nobody is asked to stop": 28,
    "a broken connection is not opened again": 12,
    "a node that answers again still counts as away": 12,
    "a request to stop leaves the ranks of a dead supervisor": 3,
    "a rank that fails is no failure": 4,
    "a stopped attempt counts as finished": 2,
    "an attempt starts beside the ranks of the last one": 662,
    "one spare replaces two nodes": 6988,
    "a lost node is not replaced": 65,
    "a conclusion forgets the nodes that it could not stop": 1,
    "an attempt is over when its first node is": 9,
    "a node is lost a little too early": 6359,
    "a request to stop tells the supervisor nothing": 0,
    "the grace after a failure never ends": 73,
    "a restart ends nothing of the last attempt": 1249,
}
