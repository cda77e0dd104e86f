-- Called by: observe.queries.queues, for `stats`, the metrics and Flower's broker page.
-- Locks: nothing. Counts stop at the limit in each (queue, kind), so a backlog of millions costs no more than that.
-- Index: jobs_claim, skipping from queue to queue, then ranges of it; jobs_processing and jobs_enqueue_failed for the rest.
WITH RECURSIVE waiting(queue) AS (
    (SELECT j.queue FROM {schema}.jobs j WHERE j.status = 'queued' ORDER BY j.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {schema}.jobs j WHERE j.status = 'queued' AND j.queue > w.queue
            ORDER BY j.queue LIMIT 1)
    FROM waiting w WHERE w.queue IS NOT NULL
), held AS (
    SELECT j.queue, count(*) AS n FROM {schema}.jobs j WHERE j.status = 'processing' GROUP BY j.queue
), parked AS (
    SELECT p.queue, count(*) AS n
    FROM (SELECT j.queue FROM {schema}.jobs j WHERE j.status = 'enqueue_failed' LIMIT %(limit)s) p
    GROUP BY p.queue
), names AS (
    SELECT queue FROM waiting WHERE queue IS NOT NULL
    UNION SELECT queue FROM held
    UNION SELECT queue FROM parked
)
SELECT
    names.queue, due.n, scheduled.n, open.n, COALESCE(held.n, 0), COALESCE(parked.n, 0),
    EXTRACT(epoch FROM clock_timestamp() - oldest.run_at)::float8
FROM names
LEFT JOIN held USING (queue)
LEFT JOIN parked USING (queue)
CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM (
        SELECT 1 FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
            SELECT 1 FROM {schema}.jobs j
            WHERE j.status = 'queued' AND j.queue = names.queue AND j.priority = p.priority::smallint
                AND j.run_at <= (SELECT clock_timestamp())
                AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
            ORDER BY j.run_at, j.id LIMIT %(limit)s) r
        LIMIT %(limit)s) c
) due
CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM (
        SELECT 1 FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
            SELECT 1 FROM {schema}.jobs j
            WHERE j.status = 'queued' AND j.queue = names.queue AND j.priority = p.priority::smallint
                AND j.run_at > (SELECT clock_timestamp()) AND j.run_at < 'infinity'
            ORDER BY j.run_at, j.id LIMIT %(limit)s) r
        LIMIT %(limit)s) c
) scheduled
CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM (
        SELECT 1 FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
            SELECT 1 FROM {schema}.jobs j
            WHERE j.status = 'queued' AND j.queue = names.queue AND j.priority = p.priority::smallint
                AND j.run_at = 'infinity'
            ORDER BY j.run_at, j.id LIMIT %(limit)s) r
        LIMIT %(limit)s) c
) open
CROSS JOIN LATERAL (
    SELECT min(r.run_at) AS run_at FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
        SELECT j.run_at FROM {schema}.jobs j
        WHERE j.status = 'queued' AND j.queue = names.queue AND j.priority = p.priority::smallint
            AND j.run_at <= (SELECT clock_timestamp())
            AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
        ORDER BY j.run_at, j.id LIMIT 1) r
) oldest
ORDER BY names.queue
