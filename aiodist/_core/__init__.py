"""The order check: a state machine without event loop, clock, arrays, threads or callbacks, and what is said of it.

Events go in (a replica posts a collective, waits, abandons, joins, ends), decisions come out (matched, doomed). Once
something is doomed, a snapshot of the ledger is analysed, and the analysis is rendered as a report. The standard
library is all that it imports. The modules, each importing only from those above it:

- `wire`: values as JSON and back, by their types.
- `terms`: Location, Reason, ReplicaState: what reports name.
- `report`: CollectiveReport and its parts, as users see them.
- `errors`: the errors that carry reports, and the others that users catch.
- `call`: Call, Post and Place: what is asked for, and from where; compare, difference, fingerprint.
- `callers`: CallerOrder: whether the same callers were gone through in another order.
- `text`: ids, counts and places as a person reads them.
- `waitgraph`: stuck(): who waits for ever; shortest_cycle().
- `source`: the program's source around calls.
- `snapshot`: what every replica called and where it is, frozen; merge.
- `divergence`: two histories aligned: skipped, added, swapped, left the loop.
- `trouble`: Picture, Collective: the open collectives of a snapshot, who is missing, the majority, how others diverged.
- `render`: the report as text: partitions, source lines, hints.
- `analysis`: analyse(snapshot) -> report.
- `ledger`: Ledger, Group, Member, Slot: the state machine.
- `recorder`: the last collectives of every replica, to be read at any time.
- `instrument`: the observer protocol on which tracing and checking stand.
"""
