-- Called by: lifecycle.claim and lifecycle.claim_now, once per turn of a worker's loop. queues[] and priorities[] are parallel, in search order.
-- Locks: the claimed rows only, one by one (the LIMIT stops the nested loop), skipping what others hold.
-- Index: jobs_claim, one range per (queue, priority) bounded by run_at (no backlog, no far ETAs); then ctid, which the lock holds still (an index loses to reading the whole of a table that seems small; who changed a row between snapshot and lock leaves it to the next claim). || '': see job_finish; on task, statistics of one task must not mislead.
WITH asked AS MATERIALIZED (
    -- hides the parameters from the planner: where it sees them, a plan for them looks cheaper than one for all, and
    -- it plans at each claim, which takes longer than to run it
    SELECT %(queues)s::text[] AS queues, %(priorities)s::smallint[] AS priorities, %(early)s::text[] AS early,
        %(strangers)s::text[] AS strangers, %(count)s::bigint AS count, %(room)s::bigint AS room
), picked AS MATERIALIZED (
    SELECT c.tid, c.task = ANY(a.early) AS early
    FROM asked a
    CROSS JOIN LATERAL unnest(a.queues, a.priorities) AS s(queue, priority)
    CROSS JOIN LATERAL (
        SELECT j.ctid AS tid, j.task
        FROM {schema}.jobs j
        WHERE j.status = 'queued' AND j.queue = s.queue AND j.priority = s.priority
            AND j.run_at <= (SELECT clock_timestamp())
            AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
            AND NOT (j.task || '' = ANY(a.strangers))
        ORDER BY j.run_at, j.id
        LIMIT (SELECT count FROM asked)
        FOR UPDATE OF j SKIP LOCKED
    ) c
    LIMIT (SELECT count FROM asked)
), numbered AS MATERIALIZED (
    SELECT tid, early, row_number() OVER () AS n FROM picked
), startable AS (
    -- what may not run twice is claimed only where it can start at once, and nothing behind it before it
    SELECT tid FROM numbered
    WHERE n <= (SELECT COALESCE(min(n) - 1, (SELECT count FROM asked)) FROM numbered
                WHERE early AND n > (SELECT room FROM asked))
), claimed AS (
    UPDATE {schema}.jobs j
    SET status = 'processing', owned_by = %(owner)s, lease_version = j.lease_version + 1,
        claimed_at = clock_timestamp(), updated_at = clock_timestamp(),
        lease_expires_at = clock_timestamp() + %(lease)s * interval '1 second',
        at_most_once = j.task = ANY(%(early)s::text[]),
        max_retries = (%(limits)s::int[])[array_position(%(limit_tasks)s::text[], j.task)],
        celery_state = CASE WHEN j.task = ANY(%(started)s::text[]) THEN 'STARTED' ELSE j.celery_state END,
        meta = CASE WHEN j.task = ANY(%(started)s::text[]) THEN NULL ELSE j.meta END
    FROM startable s
    WHERE j.ctid = s.tid AND j.status || '' = 'queued'
    RETURNING j.id, j.task, j.queue, j.priority, j.run_at, j.lease_version, j.retry_count, j.max_retries,
        j.at_most_once, j.claimed_at::text AS claimed_at, j.headers, j.properties, j.body
)
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once, claimed_at,
    headers, properties, body
FROM claimed
ORDER BY priority DESC, run_at, id
