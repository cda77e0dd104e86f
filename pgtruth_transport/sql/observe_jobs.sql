-- Called by: observe.queries.jobs, for `celery pgtruth jobs`: the newest jobs that match, whatever their status.
-- Locks: nothing. Looks at no more than the scan limit in each status (the newest ends; the next to run; all held ones).
-- Index: jobs_claim, jobs_processing, jobs_enqueue_failed, jobs_ended; one branch per status that is asked for.
WITH seen AS (
    (SELECT j.id, j.queue, j.task, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'processing' AND 'processing' = ANY(%(statuses)s::text[])
     LIMIT %(scan)s)
    UNION ALL
    (SELECT j.id, j.queue, j.task, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'enqueue_failed' AND 'enqueue_failed' = ANY(%(statuses)s::text[])
     LIMIT %(scan)s)
    UNION ALL
    (SELECT j.id, j.queue, j.task, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'queued' AND 'queued' = ANY(%(statuses)s::text[])
        AND (%(queue)s::text IS NULL OR j.queue = %(queue)s)
     ORDER BY j.queue, j.priority DESC, j.run_at, j.id
     LIMIT %(scan)s)
    UNION ALL
    (SELECT j.id, j.queue, j.task, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'done' AND 'done' = ANY(%(statuses)s::text[])
     ORDER BY j.updated_at DESC
     LIMIT %(scan)s)
    UNION ALL
    (SELECT j.id, j.queue, j.task, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'failed' AND 'failed' = ANY(%(statuses)s::text[])
     ORDER BY j.updated_at DESC
     LIMIT %(scan)s)
), picked AS MATERIALIZED (
    SELECT id
    FROM seen
    WHERE (%(queue)s::text IS NULL OR queue = %(queue)s)
        AND (%(task)s::text IS NULL OR task = %(task)s)
        AND (%(since)s::float8 IS NULL OR updated_at > clock_timestamp() - %(since)s * interval '1 second')
    ORDER BY updated_at DESC, id
    LIMIT %(limit)s
)
SELECT
    j.id, j.status, j.task, j.queue, j.priority, j.retry_count, j.lease_version, j.owned_by, j.created_at,
    j.updated_at, j.run_at::text, j.celery_state, j.error
FROM picked JOIN {schema}.jobs j USING (id)
ORDER BY j.updated_at DESC, j.id
