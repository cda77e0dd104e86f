-- Called by: control.revoke_by_stamped_headers, in batches by id: queued jobs whose headers mention one of these names.
-- Locks: nothing.
-- Index: jobs_pkey, in order; a revoke by stamp reads the headers of the whole backlog once.
SELECT id, headers
FROM {schema}.jobs
WHERE status IN ('queued', 'enqueue_failed') AND id > %(after)s AND headers IS NOT NULL
    AND EXISTS (SELECT 1 FROM unnest(%(names)s::bytea[]) AS n(name) WHERE position(n.name IN headers) > 0)
ORDER BY id
LIMIT %(count)s
