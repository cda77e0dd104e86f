"""Exchanges, queues and bindings: rows that every process shares, so that ``control`` and Flower reach every worker.

    entities = Entities(database)            one per process and database; thread-safe; may be used after a fork
    entities.declare_exchange(conn, name, type="direct", durable=True, auto_delete=False)   raises NotEquivalent
    entities.delete_exchange(conn, name)                              and its bindings
    entities.has_exchange(conn, name) -> bool                         (passive declare)
    entities.declare_queue(conn, name, durable=True, auto_delete=False, ttl=None)           ttl: seconds, from x-expires
    entities.delete_queue(conn, name, if_empty=False) -> int          with its messages (their count) and bindings
    entities.has_queue(conn, name) -> bool                            (passive declare)
    entities.touch(conn, names)              call at every poll, best from the lease keeper's thread; costs nothing
                                             until a third of a ttl has passed; restores what was collected meanwhile
    entities.bind(conn, queue, exchange, routing_key);  entities.unbind(conn, queue, exchange, routing_key)
    entities.lookup(conn, exchange, routing_key) -> list[str]
    entities.bindings(conn) -> list[tuple[str, str, str]]             (queue, exchange, routing_key)
    entities.forget()                        after the tables were rebuilt: declare everything again
    collect_garbage(conn, database, limit=1000) -> int                for the sweep: expired queues and messages
    ttl_of(auto_delete, arguments) -> float | None                    from queue_declare's arguments
"""
