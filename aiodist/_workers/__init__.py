"""Several workers: processes that each run some of the replicas and agree on every collective (floor 6).

Workers exchange one small record before anything else of a step: equal records mean the same collective, and only then
are values moved. Where records differ, every worker sends a snapshot of its ledger to worker 0, which analyses them as
one, and all raise the same report. Modules, in order; each imports only from those above it and from lower floors:

- `transport`: the protocol of engines: what moves bytes between workers; calls in worker threads, as requests.
- `ending`: the journal of a job of `aiodist run`; how this worker ends.
- `layout`: what each worker says of itself, and which replicas live on which.
- `record`: the record that opens every step, and the digests in it.
- `messages`: what workers and the coordinator tell each other, as JSON.
- `session`: one order of steps over a communicator: slots in; records and what follows from them out.
- `exchange`: what becomes of a collective's values: plan, record or transfers, result.
- `coordinator`: worker 0's part in trouble, as a state machine: snapshots in, one report out; tags of groups.
- `driver`: waits for requests on the event loop; nothing else here knows that there is one.
- `team`: this worker's part in a strategy, in what is called outside of replicas, and in each run.
- `engines`: simulated (many workers in one process, or one alone), mpi, torch.
- `control`: the connections that carry reports of trouble, and who may connect; heartbeats; a thread of its own.
- `bootstrap`: the rendezvous of a strategy's workers, and which engine serves them.
"""
