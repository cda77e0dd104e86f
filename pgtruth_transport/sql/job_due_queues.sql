-- Called by: lifecycle.due_queues, by the sweep: the queues in which something is due and unclaimed, to signal them again.
-- Locks: nothing.
-- Index: jobs_claim, skipping from queue to queue (a backlog is not walked).
WITH RECURSIVE q AS (
    (SELECT queue FROM {schema}.jobs WHERE status = 'queued' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {schema}.jobs j WHERE j.status = 'queued' AND j.queue > q.queue
            ORDER BY j.queue LIMIT 1)
    FROM q WHERE q.queue IS NOT NULL
)
SELECT q.queue
FROM q
WHERE q.queue IS NOT NULL AND EXISTS (
    SELECT 1 FROM generate_series(0, 9) AS p(priority)
    WHERE EXISTS (SELECT 1 FROM {schema}.jobs j WHERE j.status = 'queued' AND j.queue = q.queue
        AND j.priority = p.priority AND j.run_at <= (SELECT clock_timestamp())))
