"""Several workers, a process each: how they exchange records and values, and judge together (floor 2).

**The way of a step.** A worker's local replicas meet and are checked as on one machine (`collective.group`). Their
values are reduced to one part a worker, in replica order (`crossing`). Then all workers open the step together with one
collective of fixed size and kind, whatever the program does, so it always matches: a record with the digest of the call
and of its place in the order of calls (`record`, `lane`). Where the digests agree, the parts are combined
(`transfers`): small ones travel in the record itself. Where they do not, or the call has failed on some workers before
its record, no value has moved; every worker has seen it in the same buffer, tells the coordinator what its replicas did
(`state`), and raises the one verdict that comes back (`tribunal`).

**Two planes.** Records and values go through a `Communicator`, which belongs to an engine: MPI, gloo, or the simulated
one. What must arrive when an engine hangs goes through a `Control`: reports, verdicts, and who is dead, stopped or cut
off.

**Lanes.** Steps of one lane are in one order on every worker. The strategy has one for what is called outside of
replicas (`run`, `reduce`, `gather`); each run has one of its own, so that a run inside a merge function, or beside
another run, does not disturb it.

What was rejected: comparing through the control plane (a second round trip for every step); agreeing on a leader per
step (the first arrival is not known across machines, and nobody is to be taken for the truth); telling of any
trouble but the call's own in its record (a worker whose replicas wait elsewhere would post none, and nobody would be
told).
"""
