-- Called by: lifecycle.enqueue, for every published task (one statement per batch, also on an application's connection).
-- Locks: the rows it inserts. An id that exists is left alone (first write wins), unless the job is open: then this is its message.
-- Index: jobs_pkey for the conflict.
INSERT INTO {schema}.jobs AS j (
    id, status, task, queue, priority, run_at, expires_at, retry_count, headers, properties, body,
    root_id, parent_id, group_id)
SELECT
    g.id, 'queued', g.task, g.queue, g.priority,
    COALESCE(g.eta::timestamptz, clock_timestamp() + COALESCE(g.delay, 0) * interval '1 second'),
    COALESCE(g.expires::timestamptz, clock_timestamp() + g.expires_in * interval '1 second'),
    g.retry_count, g.headers, g.properties, g.body, g.root_id, g.parent_id, g.group_id
FROM unnest(
    %(ids)s::text[], %(tasks)s::text[], %(queues)s::text[], %(priorities)s::smallint[], %(etas)s::text[],
    %(delays)s::float8[], %(expires)s::text[], %(expires_ins)s::float8[], %(retry_counts)s::int[],
    %(headers)s::bytea[], %(properties)s::bytea[], %(bodies)s::bytea[],
    %(root_ids)s::text[], %(parent_ids)s::text[], %(group_ids)s::text[]
) WITH ORDINALITY AS g(id, task, queue, priority, eta, delay, expires, expires_in, retry_count, headers, properties,
    body, root_id, parent_id, group_id, position)
ORDER BY g.position
ON CONFLICT (id) DO UPDATE SET
    task = EXCLUDED.task, queue = EXCLUDED.queue, priority = EXCLUDED.priority, run_at = EXCLUDED.run_at,
    expires_at = EXCLUDED.expires_at, headers = EXCLUDED.headers, properties = EXCLUDED.properties,
    body = EXCLUDED.body, root_id = EXCLUDED.root_id, parent_id = EXCLUDED.parent_id, group_id = EXCLUDED.group_id,
    updated_at = clock_timestamp()
WHERE j.status = 'queued' AND j.run_at = 'infinity'
RETURNING j.id
