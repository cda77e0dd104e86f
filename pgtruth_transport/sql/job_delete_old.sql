-- Called by: lifecycle.delete_old, by the sweep: ended jobs that are past their keeping time, with their attempts.
-- Locks: at most the batch, skipping what others hold.
-- Index: jobs_ended, oldest first; jobs_pkey (|| '', see job_finish); attempts_pkey.
WITH old AS MATERIALIZED (
    SELECT id FROM {schema}.jobs
    WHERE status IN ('done', 'failed') AND status = %(status)s
        AND updated_at < (SELECT clock_timestamp()) - %(keep)s * interval '1 second'
    ORDER BY updated_at
    LIMIT %(count)s
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.jobs j
    WHERE j.id = ANY(ARRAY(SELECT id FROM old)) AND j.status || '' IN ('done', 'failed')
    RETURNING j.id
), notes AS (
    DELETE FROM {schema}.attempts WHERE job_id = ANY(ARRAY(SELECT id FROM gone))
)
SELECT count(*) FROM gone
