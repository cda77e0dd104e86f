-- Called by: worker.inspecting, for `inspect scheduled`: what these queues hold for later, the next ones first.
-- Locks: nothing.
-- Index: jobs_claim, one range per (queue, priority), each read from its present end and no further than the limit.
SELECT c.id, c.task, c.queue, c.priority, c.lease_version, c.retry_count, c.max_retries, c.at_most_once,
    clock_timestamp()::text AS claimed_at, c.headers, c.properties, c.body, c.run_at
FROM unnest(%(queues)s::text[]) AS s(queue)
CROSS JOIN generate_series(0, 9) AS p(priority)
CROSS JOIN LATERAL (
    SELECT * FROM {schema}.jobs j
    WHERE j.status = 'queued' AND j.queue = s.queue AND j.priority = p.priority
        AND j.run_at > (SELECT clock_timestamp()) AND j.run_at < 'infinity'
    ORDER BY j.run_at, j.id
    LIMIT %(count)s
) c
ORDER BY c.run_at, c.id
LIMIT %(count)s
