-- The demo's final table: seconds from created_at to the terminal state, over all jobs that have ended.
-- Locks nothing.
-- Reads the whole table, which is small here.
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds),
       percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds),
       max(seconds)
FROM (
    SELECT extract(epoch FROM updated_at - created_at) AS seconds
    FROM pgtruth.jobs
    WHERE status IN ('done', 'failed') AND task NOT LIKE 'pgtruth.%%'
) AS ended;
