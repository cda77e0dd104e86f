-- Called by: worker.inspecting, for `inspect query_task`: those of the named jobs that are queued for later.
-- Locks: nothing.
-- Index: jobs_pkey.
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once,
    clock_timestamp()::text AS claimed_at, headers, properties, body, run_at
FROM {schema}.jobs
WHERE id = ANY(%(ids)s::text[]) AND status = 'queued' AND queue = ANY(%(queues)s::text[])
    AND run_at > (SELECT clock_timestamp()) AND run_at < 'infinity'
