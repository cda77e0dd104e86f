-- Called by: lifecycle.overdue, by the sweep, once an hour: open jobs (their message is still to come) that nobody has touched for so long.
-- Locks: nothing.
-- Index: jobs_claim, skipping from queue to queue; within each the end of every priority, where run_at is infinite.
WITH RECURSIVE q AS (
    (SELECT queue FROM {schema}.jobs WHERE status = 'queued' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {schema}.jobs j WHERE j.status = 'queued' AND j.queue > q.queue
            ORDER BY j.queue LIMIT 1)
    FROM q WHERE q.queue IS NOT NULL
)
SELECT c.id
FROM q
CROSS JOIN generate_series(0, 9) AS p(priority)
CROSS JOIN LATERAL (
    SELECT j.id FROM {schema}.jobs j
    WHERE j.status = 'queued' AND j.queue = q.queue AND j.priority = p.priority AND j.run_at = 'infinity'
        AND j.updated_at < (SELECT clock_timestamp()) - %(keep)s * interval '1 second'
    LIMIT %(count)s
) c
WHERE q.queue IS NOT NULL
LIMIT %(count)s
