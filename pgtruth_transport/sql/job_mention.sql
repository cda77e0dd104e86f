-- Called by: lifecycle.mentioned, by the sweep, seldom: which of these ids an open job still names, as its group or in its message.
-- Locks: nothing.
-- Index: jobs_claim, jobs_processing, jobs_enqueue_failed: one pass over the open jobs. What is compressed may name anything.
SELECT DISTINCT g.id
FROM (
    SELECT q.id, q.group_id, q.headers, q.body FROM {schema}.jobs q WHERE q.status = 'queued'
    UNION ALL
    SELECT p.id, p.group_id, p.headers, p.body FROM {schema}.jobs p WHERE p.status = 'processing'
    UNION ALL
    SELECT f.id, f.group_id, f.headers, f.body FROM {schema}.jobs f WHERE f.status = 'enqueue_failed'
) AS o
JOIN unnest(%(ids)s::text[]) AS g(id)
    ON o.id <> g.id AND (o.group_id = g.id OR position(convert_to(g.id, 'UTF8') IN o.body) > 0
        OR position('"compression": "'::bytea IN o.headers) > 0)
