-- Called by: lifecycle.stand_in and transactions.scope, for published ids that were known before: some were revoked before their publish.
-- Locks: the rows it inserts: for each of those a job with its message that is past its expiry, so that the sweep ends it and tells chord and chain.
-- Index: jobs_pkey (|| '', see job_finish). A row without a message was never published; a job that stands in already is left alone.
INSERT INTO {schema}.jobs (
    id, status, task, queue, priority, expires_at, headers, properties, body, root_id, parent_id, group_id)
SELECT g.id || ':revoked', 'queued', g.task, g.queue, g.priority, 'epoch', g.headers, g.properties, g.body,
    g.root_id, g.parent_id, g.group_id
FROM unnest(
    %(ids)s::text[], %(tasks)s::text[], %(queues)s::text[], %(priorities)s::smallint[], %(headers)s::bytea[],
    %(properties)s::bytea[], %(bodies)s::bytea[], %(root_ids)s::text[], %(parent_ids)s::text[], %(group_ids)s::text[]
) AS g(id, task, queue, priority, headers, properties, body, root_id, parent_id, group_id)
JOIN {schema}.jobs j ON j.id = g.id
WHERE j.status || '' = 'failed' AND j.celery_state = 'REVOKED' AND j.headers IS NULL
ON CONFLICT DO NOTHING
