-- Called by: lifecycle.lock_unknown, by the sweep: jobs whose task no worker has known for longer than the set wait.
-- Locks: at most the batch, skipping what others hold.
-- Index: jobs_unknown.
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once,
    COALESCE(claimed_at, clock_timestamp())::text AS claimed_at, headers, properties, body
FROM {schema}.jobs
WHERE status = 'queued' AND unknown_since IS NOT NULL
    AND unknown_since <= (SELECT clock_timestamp()) - %(wait)s * interval '1 second'
LIMIT %(count)s
FOR UPDATE SKIP LOCKED
