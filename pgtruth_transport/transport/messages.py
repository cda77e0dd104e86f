"""Messages that are not tasks: remote control, events, plain kombu. Rows with a lease each; never a job.

    put(conn, db, queues, message) -> list[str]                 kombu's message dict; the queues that took it (wake these)
    fetch(conn, db, queues, count, owner=None, lease_seconds=0) -> list[Delivery]   owner None: no_ack, deleted at once
    ack(conn, db, ids, owner) -> int                            how many were still held
    requeue(conn, db, ids, owner) -> int                        back to its place, redelivered
    release_all(conn, db, owner) -> list[str]                   everything held; the queues that got something (wake)
    renew(conn, db, ids, owner, lease_seconds) -> frozenset[int]   those still held
    purge(conn, db, queue) -> int;   size(conn, db, queue) -> int   ready ones only
    delete_expired(conn, db, limit=1000) -> int                 for the sweep (entities.collect_garbage calls it)

    Delivery(id, queue, redelivered, payload)     payload: what kombu.transport.virtual.Message takes, body = bytes,
                                                  delivery_tag set to "m<id>", delivery_info["redelivered"] set
"""
