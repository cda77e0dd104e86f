-- Called by: lifecycle.next_due, when a claim found nothing: how long a worker that has room may sleep.
-- Locks: nothing.
-- Index: jobs_claim, one probe per (queue, priority).
WITH asked AS MATERIALIZED ( -- hides the parameters from the planner, see job_claim
    SELECT %(queues)s::text[] AS queues, %(priorities)s::smallint[] AS priorities
)
SELECT EXTRACT(EPOCH FROM min(c.run_at) - clock_timestamp())::float8
FROM asked a
CROSS JOIN LATERAL unnest(a.queues, a.priorities) AS s(queue, priority)
CROSS JOIN LATERAL (
    SELECT j.run_at FROM {schema}.jobs j
    WHERE j.status = 'queued' AND j.queue = s.queue AND j.priority = s.priority
        AND j.run_at > (SELECT clock_timestamp()) AND j.run_at < 'infinity'
    ORDER BY j.run_at
    LIMIT 1
) c
