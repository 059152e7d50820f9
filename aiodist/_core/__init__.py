"""The order check: a state machine without event loop, clock, arrays, threads or callbacks, and its reports (floor 1).

Events go in (a replica posts a collective, waits, abandons, joins, ends); decisions come out (matched, doomed). Once a
group is doomed, a snapshot of the ledger is analysed, and the analysis is rendered as a report. The package imports
only the standard library. The modules, each importing only from those above it:

- `wire`: values as JSON and back, by their types.
- `terms`: Location, Reason, ReplicaState: the terms of reports.
- `report`: CollectiveReport and its parts, as users see them.
- `errors`: the errors that carry reports, and the others that users catch.
- `call`: Call, Post and Place: a replica's request, and its place; OrderCheck, compare, difference, fingerprint.
- `callers`: CallerOrder: finds replicas that have made the same calls in another order, by how they reached them.
- `text`: ids, counts, times, sizes and places as text.
- `waitgraph`: stuck(): the nodes that will never continue; shortest_cycle().
- `source`: the program's source around calls.
- `snapshot`: what every replica called and where it is, frozen; merge.
- `divergence`: two histories aligned: skipped, added, swapped, left the loop.
- `trouble`: SnapshotIndex, Collective: a snapshot's open collectives: who is missing, who is to blame, what diverged.
- `render`: the report as text: partitions, source lines, advice.
- `analysis`: analyse(snapshot) -> report: which collective, or which cycle of waits, the report is on.
- `ledger`: Ledger, Group, Member, Slot: the state machine.
- `recorder`: the last collectives of every replica, readable at any time.
- `instrument`: the observer protocol for tracing and checking.
"""
