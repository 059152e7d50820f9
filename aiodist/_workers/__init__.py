"""Several workers: processes that each run some of the replicas and agree on every collective (floor 6).

Workers exchange one small record before anything else of a step: equal records mean the same collective, and only then
are values moved. Where records differ, every worker sends a snapshot of its ledger to worker 0, which analyses them as
one, and all raise the same report. The modules, each importing only from those above it:

    layout       which replicas live on which worker
    transport    the protocol of engines: what moves bytes between workers
    record       the record that opens every step
    session      one order of steps, as a state machine: slots in; records and decisions out
    portable     snapshots and reports as JSON that means the same on every machine
    coordinator  worker 0's part in trouble, as a state machine: snapshots in, one report out; tags of groups
    exchange     carries out the transfers of a plan over an engine, segment by segment
    channel      a session over a communicator: brings its records and has its steps carried out
    driver       waits for requests on the event loop; nothing else here knows that there is one
    control      the connection to worker 0 on which trouble is told; heartbeats; a thread of its own
    engines/     local (this process alone), simulated (many workers in one process), mpi
    bootstrap    how workers find each other, and what each says of itself
    span         what a run, and what is called outside of replicas, has to do with the other workers
"""
